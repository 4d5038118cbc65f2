"""The settings of a fit in one line of words, for figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.sampling import Full, Uniform


def caption(server: Any, clients: int, rounds: int) -> str:
    """Algorithm, clients per round, local work, rounds and seed of a ``FederatedServer``.

    >>> from lightning_fed import FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> caption(FederatedServer(FedAvg(server_lr=0.5), clients_per_round=10, local_steps=20, seed=3), 30, 40)
    'FedAvg(server_lr=0.5), 10 of 30 clients per round, 20 local steps, 40 rounds, seed 3'
    """
    algorithm = server.algorithm if server.federation is None else server.federation.algorithm
    steps, epochs = server.local_steps, server.local_epochs
    work = counted(epochs, "local epoch") if steps is None else counted(steps, "local step")
    if server.local_tolerance is not None:
        work = f"at most {work}, {server.local_tolerance}"
    cohort = _cohort(server.sampler, clients)
    seed = f"seed {server.seed}" if server.is_seeded else "initial weights without a seed"
    return f"{short(algorithm)}, {cohort}, {work}, {counted(rounds, 'round')}, {seed}"


def short(algorithm: Algorithm[Any, Any, Any]) -> str:
    """An algorithm with those of its hyper-parameters that are not the defaults.

    >>> from lightning_fed.algorithms import FedADMM
    >>> short(FedADMM()), short(FedADMM(eta=0.1 + 0.2, mean="active"))
    ('FedADMM', "FedADMM(eta=0.3, mean='active')")
    """
    name, own = type(algorithm).__name__, list[dataclasses.Field[Any]]()
    if dataclasses.is_dataclass(algorithm):
        own = list(dataclasses.fields(algorithm))
    values = {field.name: (getattr(algorithm, field.name), field.default) for field in own if field.init and field.repr}
    # by text, because values may hold tensors, which have no single truth
    changed = [f"{key}={_value(value)}" for key, (value, default) in values.items() if repr(value) != repr(default)]
    return f"{name}({', '.join(changed)})" if changed else name


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _value(value: Any) -> str:
    if isinstance(value, Algorithm):
        return short(value)
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _cohort(sampler: Any, clients: int) -> str:
    if type(sampler) is Full:
        return f"all {counted(clients, 'client')} in every round"
    if type(sampler) is Uniform:
        return f"{sampler.size} of {counted(clients, 'client')} per round"
    return f"cohorts of {counted(clients, 'client')} by {sampler!r}"

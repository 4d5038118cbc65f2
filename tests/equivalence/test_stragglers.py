"""Clients that do not finish: FedProx keeps what they got done, FedAvg does without these very clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer, x_of
from helpers.problems import LAW, Federation, close, federations, golden, identical, seeds
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedServer, GradientDescent, simulate
from lightning_fed.algorithms import Compressed, FedAvg, FedPAQ, FedProx
from lightning_fed.core import Reply
from lightning_fed.core.randomness import torch_generator
from lightning_fed.core.traits import Traits
from lightning_fed.transforms import TopK

STEPS, LR = 6, 0.05


def late(seed: int, k: int, i: int, p: float) -> bool:
    """The coin of client i in round k."""
    return float(torch.rand(2, generator=torch_generator(seed, k, i, "straggler"), dtype=torch.float64)[0]) < p


def descended(f, x, steps=STEPS):
    for _ in range(steps):
        x = x - LR * f.grad(x)
    return x


@given(federations(), seeds, st.sampled_from([0.2, 0.5, 0.9]))
@LAW
def test_fedavg_averages_those_who_finish(federation, seed, p):
    clients, x0, cohorts = federation
    history = simulate(FedAvg(stragglers=p), clients, x0, cohorts=cohorts, solver=GradientDescent(STEPS, LR), seed=seed)
    x = x0
    for k, cohort in enumerate(cohorts):
        in_time = [clients[i] for i in cohort if not late(seed, k, i, p)]
        if in_time:
            points = np.array([descended(f, x).numpy() for f in in_time])
            x = torch.as_tensor(np.average(points, axis=0, weights=[f.num_examples for f in in_time]))
        close(history.server[k + 1].x_bar, x, 1e-12)


@given(federations(), seeds)
@LAW
def test_without_stragglers_fedprox_without_a_pull_is_fedavg(federation, seed):
    clients, x0, cohorts = federation
    how = {"cohorts": cohorts, "solver": GradientDescent(STEPS, LR), "seed": seed}
    avg, prox = (simulate(a, clients, x0, **how) for a in (FedAvg(stragglers=0.0), FedProx(mu=0.0, stragglers=0.0)))
    assert identical(avg.server, prox.server)


class Noting(Federation):
    """Outcomes with the draws of round 0."""

    def __init__(self, *args):
        super().__init__(*args)
        self.engine.oracles = {i: replace(o, key=(4, 0, i)) for i, o in self.engine.oracles.items()}


def test_fedavg_drops_exactly_those_whose_partial_work_fedprox_keeps():
    clients, x0 = golden()
    clients = clients * 10
    everybody, solver = list(range(30)), GradientDescent(STEPS, LR)
    kept = Noting(FedProx(mu=0.0, stragglers=0.5), clients, x0, solver).outcome(everybody)
    dropped = Noting(FedAvg(stragglers=0.5), clients, x0, solver).outcome(everybody)
    finished = [i for i in everybody if kept.steps[i] == STEPS]
    assert 5 < len(finished) < 25
    assert all(1 <= kept.steps[i] < STEPS for i in everybody if i not in finished)
    assert list(dropped.states) == list(dropped.local_models) == finished
    assert (dropped.bytes_down, dropped.bytes_up) == (30 * 16, len(finished) * 16)
    for i in finished:
        assert torch.equal(kept.local_models[i], dropped.local_models[i])


@pytest.mark.parametrize(
    "algorithm", [FedAvg(stragglers=1), FedPAQ(stragglers=1), Compressed(FedAvg(stragglers=1), TopK(1))]
)
def test_a_round_in_which_nobody_finishes_changes_nothing_but_the_download(algorithm):
    clients, x0 = golden()
    done = Noting(algorithm, clients, x0).outcome([0, 1, 2])
    assert torch.equal(done.server.x_bar, x0)
    assert (done.states, done.losses, done.bytes_down, done.bytes_up) == ({}, {}, 3 * 16, 0)


class Twice(FedAvg):
    """Two exchanges; client 1's second reply is lost."""

    @property
    def traits(self):
        return Traits(exchanges=2)

    def client_step(self, client, down, local) -> Reply[Any, Any]:
        reply = super().client_step(client, down, local)
        lost = bool(local.f.num_examples == 3 and not torch.equal(down.x_bar, X0))
        return replace(reply, arrived=not lost)


CLIENTS, X0 = golden((5, 3, 2))


def test_a_client_whose_second_reply_is_lost_still_counts_in_the_first_exchange():
    done = Federation(Twice(), CLIENTS, X0, GradientDescent(STEPS, LR)).outcome([0, 1, 2])
    first = (5 * descended(CLIENTS[0], X0) + 3 * descended(CLIENTS[1], X0) + 2 * descended(CLIENTS[2], X0)) / 10
    close(done.server.x_bar, (5 * descended(CLIENTS[0], first) + 2 * descended(CLIENTS[2], first)) / 7, 1e-14)
    assert done.steps == dict.fromkeys(range(3), 2 * STEPS)  # what is lost was work all the same


def test_a_fit_does_without_stragglers_and_without_their_buffers():
    def run(algorithm, sampler_seed=9):
        server, module = FederatedServer(algorithm, local_epochs=2, evaluate_every=0, seed=sampler_seed), Net(norm=True)
        quiet_trainer(server, 1, limit_val_batches=0).fit(module, datamodule=classification(drop_last=True))
        return server, module

    server, module = run(FedAvg(stragglers=0.5))
    in_time = [i for i in range(4) if not late(9, 0, f"c{i}", 0.5)]
    assert 0 < len(in_time) < 4
    assert server.report.metrics["clients"] == len(in_time)
    assert list(server.report.losses) == [f"c{i}" for i in in_time]

    data = classification(drop_last=True)
    data.splits["train"] = {cid: d for cid, d in data.splits["train"].items() if int(cid[1]) in in_time}
    only = FederatedServer(FedAvg(), local_epochs=2, evaluate_every=0, seed=9)
    quiet_trainer(only, 1, limit_val_batches=0).fit(other := Net(norm=True), datamodule=data)
    assert torch.equal(x_of(module), x_of(other))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), other.buffers(), strict=True))

    nobody, unmoved = run(FedAvg(stragglers=1.0))
    assert torch.equal(x_of(unmoved), x_of(Net(norm=True)))
    assert nobody.report.metrics["clients"] == 0
    buffers = sum(b.numel() * b.element_size() for b in unmoved.buffers())
    assert nobody.federation.bytes_down == 4 * (4 * len(x_of(unmoved)) + buffers)
    assert nobody.federation.bytes_up == 0

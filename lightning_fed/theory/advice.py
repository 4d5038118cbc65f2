"""Recommend an algorithm and its steps from the facts of a run, with the reasons; and tell what may go wrong.

The rules are measured, not proved; :mod:`~lightning_fed.theory.guarantee` has what a theorem asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_fed.algorithms.fedadmm import AUTO, FedADMM, Mean
from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedprimaldual import FedPrimalDual
from lightning_fed.core.algorithm import Algorithm, Weights
from lightning_fed.core.memory import ClientId
from lightning_fed.core.records import leaves_of
from lightning_fed.prox import Zero
from lightning_fed.sampling import Sampler
from lightning_fed.theory.stability import Stability, stability_of

AnyAlgorithm = Algorithm[Any, Any, Any]

#: With fewer expected visits of a client in the whole run, methods with duals fell behind FedAvg.
FEW_VISITS = 5

#: From the client's last model, local work follows the server if penalty * tau is at least this.
FOLLOWS = 2

#: Separate steps of FedPrimalDual: dual step * tau, server step / tau.
A, B = 0.1, 3.0


@dataclass(frozen=True, eq=False)
class Run:
    """What advice on a run rests on.

    Args:
        algorithm: the algorithm that the run has now.
        sampler: draws its cohorts.
        examples: number of training samples, by client.
        rounds: number of rounds, inf if there is no limit.
        local_steps: median of the planned local steps of a visit.
        lr: the advised learning rate; None if local steps are not plain gradient steps.
        tau: planned sum of the step sizes of a visit with it, as the mean by each of the two weights.
    """

    algorithm: AnyAlgorithm
    sampler: Sampler
    examples: Mapping[ClientId, int]
    rounds: float
    local_steps: int
    lr: float | None
    tau: Mapping[Weights, float]

    @property
    def inner(self) -> AnyAlgorithm:
        """The algorithm without the compression of its messages."""
        found: AnyAlgorithm = getattr(self.algorithm, "algorithm", self.algorithm)
        return found

    @property
    def per_round(self) -> float:
        """Expected number of clients in a round."""
        return float(self.sampler.inclusion_probabilities(len(self.examples)).sum())

    @property
    def visits(self) -> float:
        """Expected number of visits of a client in the whole run."""
        return self.rounds * self.per_round / len(self.examples)

    def stability(self, algorithm: AnyAlgorithm) -> Stability | None:
        """Whether an algorithm's dual and server steps suit the run's sampling and its weights; None without such."""
        if algorithm.dual_steps is None:
            return None
        return stability_of(
            algorithm.dual_steps, [algorithm.weight(count) for count in self.examples.values()], self.sampler
        )


@dataclass(frozen=True, eq=False)
class Recommendation:
    """An algorithm, with the reason for it and for its settings, by name."""

    algorithm: AnyAlgorithm
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Caution:
    """Something that may go wrong: a ``code`` for programs, a ``text`` for people."""

    code: str
    text: str


def recommend(run: Run, mean: Mean = "active", weights: Weights | None = None) -> Recommendation:
    """The algorithm for a run: ``mean`` is that of FedADMM, ``weights`` those of the run's algorithm by default."""
    weights = run.inner.weights if weights is None else weights
    free = isinstance(run.inner.g, Zero)
    if run.lr is None:
        return _without_tau(run, weights, free)
    if run.visits < FEW_VISITS and free:
        return Recommendation(FedAvg(weights=weights), {"algorithm": _few(run)})
    if mean != "active":
        return _admm(run, mean, weights)
    active = _admm(run, mean, weights)
    found = run.stability(active.algorithm)
    return active if found is None or found.safe else _separate(run, weights, found)


def _without_tau(run: Run, weights: Weights, free: bool) -> Recommendation:
    reason = "The optimiser is not plain SGD, so that a visit has no known length, and no rule gives dual steps."
    if free:
        return Recommendation(FedAvg(weights=weights), {"algorithm": f"{reason} FedAvg needs none."})
    return Recommendation(run.algorithm, {"algorithm": f"{reason} FedAvg needs none, but has no g: keep yours."})


def _few(run: Run) -> str:
    return (
        f"{run.rounds:g} rounds with {run.per_round:g} of {len(run.examples)} clients visit a client"
        f" {run.visits:.2g} times. With fewer than {FEW_VISITS} visits methods with duals fell behind FedAvg."
    )


def _admm(run: Run, mean: Mean, weights: Weights) -> Recommendation:
    tau, share = run.tau[weights], AUTO[mean]
    algorithm = FedADMM(eta=_rounded(share / tau), g=run.inner.g, weights=weights, mean=mean)
    where = {
        "active": "Models averaged over the cohort and duals over all clients move the server in every round; over all"
        " n clients (the paper) it waits for those not yet seen.",
        "seen": "The average over the clients seen so far; the paper's theorem holds once everybody was seen.",
        "all": "The paper's average over all clients, for which its theorem holds.",
    }[mean]
    of = "lr * steps" if len({*run.tau.values()}) == 1 else "the mean sum of a visit's step sizes"
    return Recommendation(
        algorithm,
        {
            "mean": where,
            "eta": f"{share:g} / tau with tau = {of} = {tau:.3g}: a visit of that length acts like a proximal step of"
            " penalty 1 / tau.",
            "start": "Visits of this length are too short to lead from the client's own last model to the server's.",
        },
    )


def _separate(run: Run, weights: Weights, line: Stability) -> Recommendation:
    """Separate steps, as long as the weights and the sampling bear them."""
    algorithm = FedPrimalDual(a=A, b=B, g=run.inner.g, weights=weights)
    found = run.stability(algorithm)
    assert found is not None
    assert found.largest_b is not None
    b = "Server steps of b * tau; 3 was best on unequal clients."
    if not found.safe:
        algorithm = FedPrimalDual(a=A, b=_rounded(found.largest_b, down=True), g=run.inner.g, weights=weights)
        b = "The largest that is safe with these weights and this sampling."
    heavy = max(run.examples, key=lambda cid: run.examples[cid])
    share = run.examples[heavy] / sum(run.examples.values())
    return Recommendation(
        algorithm,
        {
            "algorithm": f"Client {heavy!r} has {share:.0%} of the samples. With weights by samples the single eta of"
            f" FedADMM gives ab = 1, and only {line.largest_ab:.2g} is safe here; separate steps give a * b ="
            f' {algorithm.a * algorithm.b:.2g}. (With weights="uniform": FedADMM.)',
            "a": "Dual steps of a / tau: slow duals do not disturb a model that moves fast.",
            "b": b,
        },
    )


def cautions(
    run: Run, algorithm: AnyAlgorithm, lr: float | None, tau: float, L: float, learns: bool = False
) -> list[Caution]:
    """What may go wrong if ``algorithm`` runs with ``lr``, visits of length ``tau`` and curvature L.

    ``learns`` is True if a trial has shown that steps of this size do not diverge.
    """
    rho, found = algorithm.traits.penalty, []
    inner: Any = getattr(algorithm, "algorithm", algorithm)
    if rho and getattr(inner, "start", None) == "local" and rho * tau < FOLLOWS:
        text = f"The local problem is not solved: with start='local' and penalty * lr * steps = {rho * tau:.2g} < 2, a"
        found.append(Caution("unsolved", f"{text} client's model does not follow the server's."))
    if lr is not None and lr * rho >= 2:
        found.append(Caution("lr_penalty", f"lr * penalty = {lr * rho:.3g} >= 2: local steps diverge."))
    elif lr is not None and lr * (L + rho) >= 2 and not learns:
        text = f"lr * (L + penalty) = {lr * (L + rho):.3g} >= 2: gradient steps diverge where curvature is"
        found.append(Caution("diverges", f"{text} largest. Use lr below {2 / (L + rho):.2g}."))
    stability = run.stability(algorithm)
    if stability is not None and not stability.safe:
        why = stability.reason(list(run.examples)[stability.client])
        text = f"ab = dual step * server step = {stability.ab:.3g} may diverge: {why}."
        found.append(Caution("unsafe", f"{text} Largest safe ab: {stability.largest_ab:.3g}."))
    if run.visits < FEW_VISITS and leaves_of(inner.init_client(torch.zeros(1))):  # clients keep duals or the like
        found.append(Caution("few_visits", f"{_few(run)} Use FedAvg or FedProx, or more rounds or larger cohorts."))
    return found


def _rounded(value: float, digits: int = 3, down: bool = False) -> float:
    """A number as a person would write it.

    >>> _rounded(0.123456), _rounded(0.6789, 2, down=True)
    (0.123, 0.67)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.floor(value / unit) * unit if down else value:.{digits}g}")

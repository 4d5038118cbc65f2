"""Recommendations follow the facts of a run, and never earn a warning themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.problems import LAW
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedMid, FedPrimalDual, FedProx
from lightning_fed.algorithms.compressed import Compressed
from lightning_fed.prox import L1
from lightning_fed.sampling import Full, Uniform
from lightning_fed.theory.advice import Run, cautions, recommend
from lightning_fed.transforms import TopK

#: One client has a quarter of the samples.
UNEQUAL = dict(enumerate([1000] + 29 * [100]))


def run(algorithm: Algorithm | None = None, **kwargs: Any) -> Run:
    facts = {
        "sampler": Uniform(10),
        "examples": dict.fromkeys(range(30), 100),
        "rounds": 100,
        "local_steps": 300,
        "lr": 0.01,
    }
    tau = {"uniform": 3.0, "samples": 3.0}
    return Run(**{"algorithm": algorithm or FedADMM(), **facts, "tau": tau, **kwargs})


def codes(facts: Run, algorithm: Algorithm, lr: float = 0.01, tau: float = 3.0, L: float = 5.0, **kw: bool) -> set[str]:
    return {one.code for one in cautions(facts, algorithm, lr, tau, L, **kw)}


@pytest.mark.parametrize(("mean", "eta"), [("active", 0.1), ("seen", 0.333), ("all", 0.333)])
def test_eta_is_the_rule_over_the_length_of_a_visit(mean: Any, eta: float) -> None:
    assert recommend(run(), mean).algorithm == FedADMM(eta=eta, mean=mean, start="server")
    assert "tau = lr * steps = 3" in recommend(run(), mean).reasons["eta"]


def test_what_the_run_minimises_stays() -> None:
    found = recommend(run(FedDR(eta_hat=2.0, g=L1(0.1), start="local"))).algorithm
    assert found == FedADMM(eta=0.1, g=L1(0.1), mean="active")
    assert recommend(run(Compressed(FedADMM(weights="samples"), TopK(1)))).algorithm.weights == "samples"
    assert recommend(run(), weights="samples").algorithm == FedADMM(eta=0.1, mean="active", weights="samples")


def test_the_length_of_a_visit_is_the_mean_by_the_weights() -> None:
    tau = {"uniform": 3.0, "samples": 6.0}
    assert recommend(run(tau=tau)).algorithm.eta == 0.1
    assert recommend(run(tau=tau), weights="samples").algorithm.eta == 0.05


def test_unequal_weights_need_separate_steps() -> None:
    facts = run(FedAvg(), examples=UNEQUAL)
    assert recommend(facts).algorithm == FedPrimalDual(a=0.1, b=3.0, weights="samples")
    assert "26% of the samples" in recommend(facts).reasons["algorithm"]
    assert recommend(facts, weights="uniform").algorithm == FedADMM(eta=0.1, mean="active")
    assert recommend(facts, "all").algorithm.mean == "all"  # whose server does not add duals to a cohort's mean


def test_separate_steps_shrink_until_they_are_safe() -> None:
    facts = run(FedAvg(), examples=UNEQUAL, sampler=Uniform(1), rounds=1000)
    found = recommend(facts).algorithm
    assert isinstance(found, FedPrimalDual)
    stability = facts.stability(found)
    assert stability is not None
    assert stability.safe
    assert 0.99 * stability.largest_b <= found.b < 1
    assert not facts.stability(replace(found, b=3.0)).safe  # type: ignore[union-attr]


@pytest.mark.parametrize(("rounds", "expected"), [(14, FedAvg), (15, FedADMM), (float("inf"), FedADMM)])
def test_clients_that_are_seldom_seen_get_fedavg(rounds: float, expected: type[Algorithm]) -> None:
    facts = run(rounds=rounds)  # 10 of 30 clients: 15 rounds are five visits
    found = recommend(facts)
    assert type(found.algorithm) is expected
    assert ("few_visits" in codes(facts, FedADMM())) == (expected is FedAvg)
    assert not codes(facts, found.algorithm)
    assert not codes(facts, FedMid())  # keeps nothing
    assert found.algorithm.weights == "uniform"  # the run's own


def test_a_regulariser_is_not_given_up_for_fedavg() -> None:
    facts = run(FedADMM(g=L1(0.1)), rounds=3)
    assert recommend(facts).algorithm == FedADMM(eta=0.1, g=L1(0.1), mean="active")
    assert codes(facts, recommend(facts).algorithm) == {"few_visits"}


def test_other_optimisers_have_no_length_of_a_visit() -> None:
    assert recommend(run(lr=None)).algorithm == FedAvg(weights="uniform")
    kept = FedDR(g=L1(0.1))
    assert recommend(run(kept, lr=None)).algorithm is kept


@pytest.mark.parametrize(
    ("algorithm", "lr", "tau", "expected"),
    [
        (FedADMM(eta=0.6, start="local"), 0.01, 3.0, {"unsolved"}),
        (FedADMM(eta=0.7, start="local"), 0.01, 3.0, set()),
        (FedDR(eta_hat=2.0, start="local"), 0.01, 3.0, {"unsolved"}),
        (Compressed(FedADMM(eta=0.6, start="local"), TopK(1)), 0.01, 3.0, {"unsolved"}),
        (FedADMM(eta=0.6), 0.01, 3.0, set()),
        (FedADMM(eta=20.0), 0.1, 30.0, {"lr_penalty"}),
        (FedADMM(eta=14.0), 0.1, 30.0, set()),
        (FedADMM(eta=16.0), 0.1, 30.0, {"diverges"}),
        (FedProx(mu=1.0), 0.5, 150.0, {"diverges"}),
    ],
    ids=str,
)
def test_what_may_go_wrong_is_told_from_its_limit_on(
    algorithm: Algorithm, lr: float, tau: float, expected: set[str]
) -> None:
    assert codes(run(), algorithm, lr, tau) == expected
    assert codes(run(), algorithm, lr, tau, learns=True) == expected - {"diverges"}  # it was tried


def test_an_unsafe_run_is_told_the_largest_ab() -> None:
    facts = run(FedADMM(mean="active", weights="samples"), examples=UNEQUAL)
    (caution,) = cautions(facts, facts.algorithm, 0.01, 3.0, 5.0)
    assert caution.code == "unsafe"
    assert f"Largest safe ab: {facts.stability(facts.algorithm).largest_ab:.3g}" in caution.text  # type: ignore[union-attr]


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(1, 300),
    st.floats(1e-3, 100),
    st.sampled_from(["uniform", "samples"]),
)
@LAW
def test_a_recommendation_never_earns_a_warning(
    examples: list[int], size: int, rounds: int, tau: float, weights: Any
) -> None:
    sampler = Uniform(min(size, len(examples))) if size < 12 else Full()
    facts = run(
        examples=dict(enumerate(examples)), sampler=sampler, rounds=rounds, tau={"uniform": tau, "samples": tau}
    )
    found = recommend(facts, weights=weights).algorithm
    assert not codes(facts, found, lr=tau / 300, tau=tau, L=0.1)
    assert found.weights == weights

"""What once gave silently wrong numbers is refused, or made right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.problems import golden

from lightning_fed import GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedADMM, FedDR
from lightning_fed.callbacks import ClientEvaluation, Faults
from lightning_fed.core.randomness import derive_seed
from lightning_fed.core.round import run_round
from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP, CifarCNN, FemnistCNN
from lightning_fed.partition import Sizes
from lightning_fed.prox import L1, Box, Sum
from lightning_fed.sampling import Bernoulli, DoublyUniform, Systematic, Uniform
from lightning_fed.transforms import Compose


def test_whole_numbers_become_floating_point() -> None:
    clients, _ = golden()
    whole = simulate(FedADMM(), clients, torch.tensor([1, -1]), rounds=3)
    real = simulate(FedADMM(), clients, torch.tensor([1.0, -1.0], dtype=torch.float64), rounds=3)
    assert torch.equal(whole.x_bar, real.x_bar)
    assert Quadratic(torch.eye(2), torch.tensor([1, 2])).b.dtype == torch.float64


@pytest.mark.parametrize("d", [1, 3])
def test_a_first_model_of_another_shape_is_refused(d: int) -> None:
    clients, _ = golden()
    with pytest.raises(ValueError, match=rf"x0 has shape \({d},\), the clients' b \(2,\)"):
        simulate(FedADMM(), clients, torch.zeros(d, dtype=torch.float64), rounds=1)


def test_a_seed_counts_by_its_value_and_not_by_its_type() -> None:
    assert derive_seed(np.int64(3), True) == derive_seed(3, 1)
    assert derive_seed("3") != derive_seed(3)
    assert Uniform(2).cohort(5, np.int64(0), 4) == Uniform(2).cohort(5, 0, 4)


def test_a_client_twice_in_a_cohort_is_refused() -> None:
    algorithm = FedADMM()
    server = algorithm.init_server(torch.zeros(2))
    with pytest.raises(ValueError, match=r"names each client once; got \[0, 0\]"):
        run_round(algorithm, server, [0, 0], None, lambda cid: None, {0: 1.0, 1: 1.0}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [FedADMM, FedDR])
@pytest.mark.parametrize("g", ["l1", L1, None, 0.1])
def test_a_g_that_is_no_prox_is_refused(kind: Any, g: Any) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}.g must be a Prox such as L1"):
        kind(g=g)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedADMM(project_initial="no"), "FedADMM.project_initial must be one of True, False; got 'no'"),
        (lambda: Box("a", "b"), "Box needs lo <= hi, got lo='a'"),
        (lambda: Box(float("inf"), float("inf")), "Box needs lo <= hi, got lo=inf"),
        (lambda: GradientDescent(1.5, 0.1), "steps >= 1 and lr > 0, got steps=1.5"),
        (lambda: GradientDescent(1, float("inf")), "steps >= 1 and lr > 0, got steps=1, lr=inf"),
        (lambda: Quadratic.scalar(1.0, 1.0, 1.5), "num_examples must be a whole number >= 1, got 1.5"),
        (lambda: Bernoulli([[0.5, 0.5]]), r"got shape \(1, 2\)"),
        (lambda: Bernoulli(0.0), r"must lie in \(0, 1\], got 0.0\.$"),
        (lambda: Uniform(6).cohort(5, 0, 0), "Cannot draw 6 clients per round: the federation has 5"),
        (
            lambda: simulate(FedADMM(), [Quadratic.scalar(1, 1)], cohorts=[{0}], sampler=Uniform(1)),
            "cohorts= and sampler=",
        ),
        (lambda: simulate(FedADMM(), [Quadratic.scalar(1, 1)], cohorts=[[0, "a"]]), r"cohorts\[0\] names client 'a'"),
        (lambda: simulate(FedADMM(), [Quadratic.scalar(1, 1)], rounds=True), "rounds must be a whole number"),
    ],
)
def test_wrong_values_are_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Bernoulli("1"), r"Bernoulli\.p must be made of numbers, got '1', which is text"),  # type: ignore[arg-type]
        (lambda: DoublyUniform("abc"), r"DoublyUniform\.q must be made of numbers, got 'abc'"),  # type: ignore[arg-type]
        (lambda: Systematic(2, ["1", "2"]), r"Systematic\.weights must be made of numbers"),  # type: ignore[list-item]
        (lambda: Sum(2.5), r"Sum is made of one Prox or more, such as L1\(1e-4\), got 2\.5"),  # type: ignore[arg-type]
        (lambda: Compose(0.5), r"Compose\.transforms must be a list of Transforms, got 0\.5"),  # type: ignore[arg-type]
        (lambda: Sizes(10), r"Sizes\.sizes must be a list, one whole number per client; got 10"),  # type: ignore[arg-type]
        (lambda: MLP(10), r"MLP\.sizes must be two or more whole numbers >= 1, got 10"),  # type: ignore[arg-type]
        (lambda: MLP(log_train="no"), r"MLP\.log_train must be one of True, False; got 'no'"),  # type: ignore[arg-type]
        (lambda: FemnistCNN(classes="62"), r"FemnistCNN needs a whole number >= 2 of classes, got '62', which"),  # type: ignore[arg-type]
        (lambda: CifarCNN(classes=None), r"CifarCNN needs a whole number >= 2 of classes, got None"),  # type: ignore[arg-type]
        (lambda: Synthetic(iid="no"), r"Synthetic\.iid must be one of True, False; got 'no'"),  # type: ignore[arg-type]
        (lambda: Faults(rate=0.5, clients="anna"), r"Faults\.clients must be a list of clients, such as \['anna'\]"),
        (lambda: ClientEvaluation(also_after="12"), r"ClientEvaluation\.also_after must be a list of whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_texts_and_single_values_are_refused_where_numbers_or_lists_are_wanted(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()


def test_an_algorithm_that_returns_something_else_is_named() -> None:
    class Forgets(FedADMM):
        def client_step(self, client: Any, down: Any, local: Any) -> Any:
            return None

    class Loses(FedADMM):
        def server_step(self, server: Any, total: Any) -> Any:
            return {}

    with pytest.raises(TypeError, match=r"Forgets.client_step must return a Reply, got None"):
        simulate(Forgets(), [Quadratic.scalar(1, 1)], rounds=1)
    with pytest.raises(TypeError, match=r"Loses.server_step must return a record with x_bar, got {}"):
        simulate(Loses(), [Quadratic.scalar(1, 1)], rounds=1)

"""The golden table, continued: FedADMM's relatives, methods with corrected or proximal steps, asynchronous runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import references
from helpers.problems import DOUGLAS_RACHFORD_FULL, FULL, PARTIAL, PEACEMAN_RACHFORD_FULL, close, golden, in_numpy
from torch import Tensor

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import (
    Algorithm,
    FedADMM,
    FedDR,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedPD,
    FedSplit,
    ParallelDRS,
    Scaffold,
)
from lightning_fed.prox import L1

EXACT, TWO_STEPS = Exact(), GradientDescent(steps=2, lr=0.1)
UNLIKE_STEPS = [GradientDescent(steps=tau, lr=0.1 / tau) for tau in (1, 2, 3)]
EVENTS = [(0, 0), (1, 1), (2, 2), (0, 1)]

DR_II_BROADCAST = [
    (1.0000000000, -1.0000000000),
    (1.0000000000, -1.0000000000),
    (0.6000000000, -0.1333333333),
    (0.3021276596, 0.2496453901),
]
PD_SKIPPING = [
    (0.3021276596, 0.2496453901),
    (0.1649232936, 0.3153181430),
    (0.0503999620, 0.3474690494),
    (-0.0433822832, 0.3813532543),
]
DYN_PARTIAL = [
    (1.0000000000, -0.3333333333),
    (0.0803782506, 0.4680851064),
    (0.0212503283, 0.2845744681),
    (0.0578788607, 0.4084107570),
]
SCAFFOLD_I = [
    (1.0000000000, -0.6400000000),
    (0.6980333333, -0.1593000000),
    (0.5373910417, -0.0797045000),
    (0.4866314601, 0.0450852719),
]
SCAFFOLD_II = [
    (1.0000000000, -0.6400000000),
    (0.6982000000, -0.1713000000),
    (0.5442725000, -0.0686961667),
    (0.4786354693, 0.0529326993),
]
SCAFFOLD_II_FULL = [
    (0.8100000000, -0.5558333333),
    (0.6463972222, -0.2571229167),
    (0.5100176863, -0.0610497089),
    (0.3981435049, 0.0678226598),
]
LIN = [
    (0.8075000000, -0.5483333333),
    (0.6445712963, -0.2537405093),
    (0.5091314261, -0.0605482152),
    (0.3979929659, 0.0669483583),
]
LIN_UNLIKE = [
    (0.9011774691, -0.7597222222),
    (0.8099059902, -0.5640021876),
    (0.7260136987, -0.4044099307),
    (0.6492179676, -0.2741298530),
]
LIN_TOP_1 = [
    (0.8075000000, -0.5483333333),
    (0.8047854167, -0.2551583333),
    (0.4757511927, -0.2522465260),
    (0.4721933256, 0.1320031251),
]
MID = [
    (0.9610000000, -0.6020000000),
    (0.6289575000, -0.2146450000),
    (0.4967948594, -0.0087744250),
    (0.2774365233, 0.1021432166),
]
DUAL_AVG = [
    (0.9810000000, -0.6220000000),
    (0.6652575000, -0.2485200000),
    (0.5478767344, -0.0379138000),
    (0.3341576620, 0.0000000000),
]
ASYNC = [
    (1.0000000000, -0.6666666667),
    (0.7021276596, -0.2836879433),
    (0.3021276596, 0.2496453901),
    (0.2756501182, 0.2496453901),
]

TABLE: dict[str, tuple[Algorithm, dict[str, Any], list[tuple[float, float]]]] = {
    "parallel DRS": (ParallelDRS(eta_hat=0.5), {"cohorts": FULL}, DOUGLAS_RACHFORD_FULL),
    "parallel DRS, alpha 2": (ParallelDRS(eta_hat=0.5, alpha=2.0), {"cohorts": FULL}, PEACEMAN_RACHFORD_FULL),
    "FedDR-II, upload first": (FedDRII(eta_hat=0.5, mode="upload_first"), {"cohorts": PARTIAL}, DR_II_BROADCAST),
    "FedDR-II, fresh, full": (FedDRII(eta_hat=0.5), {"cohorts": FULL}, DOUGLAS_RACHFORD_FULL),
    "FedPD": (FedPD(eta_hat=0.5), {"cohorts": FULL}, DOUGLAS_RACHFORD_FULL),
    "FedDyn, partial": (FedDyn(alpha=2.0), {"cohorts": PARTIAL}, DYN_PARTIAL),
    "FedDyn, full": (FedDyn(alpha=2.0), {"cohorts": FULL}, DOUGLAS_RACHFORD_FULL),
    "FedSplit": (FedSplit(s=0.5), {"cohorts": FULL}, PEACEMAN_RACHFORD_FULL),
    "SCAFFOLD I": (Scaffold(option=1), {"cohorts": PARTIAL, "solver": TWO_STEPS}, SCAFFOLD_I),
    "SCAFFOLD II": (Scaffold(option=2), {"cohorts": PARTIAL, "solver": TWO_STEPS}, SCAFFOLD_II),
    "SCAFFOLD II, full": (Scaffold(), {"cohorts": FULL, "solver": TWO_STEPS}, SCAFFOLD_II_FULL),
    "FedLin": (FedLin(), {"cohorts": FULL, "solver": TWO_STEPS}, LIN),
    "FedLin, unlike steps": (FedLin(), {"cohorts": FULL, "solver": UNLIKE_STEPS}, LIN_UNLIKE),
    "FedLin, server top 1": (FedLin(server_k=1), {"cohorts": FULL, "solver": TWO_STEPS}, LIN_TOP_1),
    "FedMid": (FedMid(g=L1(0.1)), {"cohorts": PARTIAL, "solver": TWO_STEPS}, MID),
    "FedDualAvg": (FedDualAvg(g=L1(0.1)), {"cohorts": PARTIAL, "solver": TWO_STEPS}, DUAL_AVG),
    "asynchronous FedDR": (FedDR(eta_hat=0.5, alpha=0.8), {"events": EVENTS}, ASYNC),
    "asynchronous FedADMM": (FedADMM(eta=2.0, alpha=0.8), {"events": EVENTS}, ASYNC),
}


@pytest.mark.parametrize("row", TABLE)
def test_models_after_each_of_four_rounds_are_those_of_the_table(row: str) -> None:
    algorithm, how, expected = TABLE[row]
    clients, x0 = golden()
    history = simulate(algorithm, clients, x0, **how)
    close([s.x_bar.numpy() for s in history.server], [(1.0, -1.0), *expected], 1e-9)


class Planned(FedPD):
    """FedPD whose coins are known: communicate, skip, skip, communicate."""

    def exchanges(self, round: int) -> bool:
        return (True, False, False, True)[round]


def test_fedpd_that_skips_two_rounds_has_the_mean_copies_of_the_table() -> None:
    clients, x0 = golden()
    history = simulate(Planned(eta_hat=0.5), clients, x0, cohorts=FULL)
    means = [torch.stack([s.x_0i for s in states]).mean(0).numpy() for states in history.clients]
    close(means, [(1.0, -1.0), *PD_SKIPPING], 1e-9)
    shown: list[Tensor] = [s.x_bar for s in history.server[1:]]
    close(shown[0], PD_SKIPPING[0], 1e-9)
    assert torch.equal(shown[1], shown[0])  # users of the model see no change in a skipped round
    assert torch.equal(shown[2], shown[0])
    close(shown[3], PD_SKIPPING[3], 1e-9)


LINEAR = {"steps": (2, 2, 2), "lr": (0.1, 0.1, 0.1)}
REFERENCES: dict[str, tuple[Any, list[tuple[float, float]]]] = {
    "FedDR-II": (lambda p, x: references.feddr_ii(p, x, PARTIAL, 0.5, mode="upload_first"), DR_II_BROADCAST),
    "FedDR-II fresh": (lambda p, x: references.feddr_ii(p, x, FULL, 0.5), DOUGLAS_RACHFORD_FULL),
    "FedPD": (lambda p, x: references.fedpd(p, x, [True] * 4, 0.5), DOUGLAS_RACHFORD_FULL),
    "FedDyn": (lambda p, x: references.feddyn(p, x, PARTIAL, 2.0), DYN_PARTIAL),
    "SCAFFOLD I": (lambda p, x: references.scaffold(p, x, PARTIAL, 1, **LINEAR), SCAFFOLD_I),
    "SCAFFOLD II": (lambda p, x: references.scaffold(p, x, PARTIAL, 2, **LINEAR), SCAFFOLD_II),
    "FedLin": (lambda p, x: references.fedlin(p, x, 4, **LINEAR, server_k=1), LIN_TOP_1),
    "FedLin unlike": (lambda p, x: references.fedlin(p, x, 4, (1, 2, 3), (0.1, 0.05, 0.1 / 3)), LIN_UNLIKE),
    "FedMid": (lambda p, x: references.fedmid(p, x, PARTIAL, 2, 0.1, references.soft(0.1)), MID),
    "FedDualAvg": (lambda p, x: references.feddualavg(p, x, PARTIAL, 2, 0.1, references.soft(0.1)), DUAL_AVG),
    "asynchronous FedDR": (lambda p, x: references.async_feddr(p, x, EVENTS, 0.5, 0.8), ASYNC),
}


@pytest.mark.parametrize("row", REFERENCES)
def test_the_references_of_these_tests_reproduce_the_table_too(row: str) -> None:
    run, expected = REFERENCES[row]
    clients, x0 = golden()
    close([r.x_bar for r in run(in_numpy(clients), x0.numpy())[1:]], expected, 1e-9)


def test_the_reference_of_fedpd_reproduces_the_skipped_rounds_too() -> None:
    clients, x0 = golden()
    rows = references.fedpd(in_numpy(clients), x0.numpy(), [True, False, False, True], 0.5)
    close([np.mean(row.x_0, axis=0) for row in rows[1:]], PD_SKIPPING, 1e-9)

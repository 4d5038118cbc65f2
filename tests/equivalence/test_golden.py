"""The golden table: numbers computed once, outside this package, for three clients in the plane."""

import pytest
from helpers import references
from helpers.problems import DOUGLAS_RACHFORD_FULL, FULL, PARTIAL, PEACEMAN_RACHFORD_FULL, close, golden, in_numpy

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR, FedDRII, FedProx
from lightning_fed.prox import L1, Box

ALIKE, UNLIKE = (1, 1, 1), (5, 3, 2)
EXACT, TWO_STEPS = Exact(), GradientDescent(steps=2, lr=0.1)

ADMM_PARTIAL = [
    (1.0000000000, -0.6666666667),
    (0.2832151300, 0.2676122931),
    (0.1802153927, 0.2453270292),
    (0.1525850663, 0.3184001103),
]
ADMM_L1 = [
    (0.9500000000, -0.6166666667),
    (0.2200236407, 0.2231442080),
    (0.1053643289, 0.2051568164),
    (0.0818664908, 0.2713260194),
]
ADMM_BOX = [
    (0.2000000000, -0.2000000000),
    (0.0910638298, 0.2000000000),
    (0.0562836879, 0.2000000000),
    (0.0554153212, 0.2000000000),
]
ADMM_UNLIKE = [
    (1.0000000000, -0.5000000000),
    (0.4663829787, 0.1989361702),
    (0.3854127660, 0.1909787234),
    (0.3705154912, 0.2273313898),
]
ADMM_FROM_LOCAL = [
    (1.0000000000, -0.7866666667),
    (0.6585777778, -0.2628666667),
    (0.6044508704, -0.1352071111),
    (0.5435828689, -0.0699219695),
]
ADMM_FROM_SERVER = [
    (1.0000000000, -0.7866666667),
    (0.6493333333, -0.1572666667),
    (0.4495033333, 0.0704413333),
    (0.3095626167, 0.3103902178),
]
ADMM_FROM_CENTRE = [
    (1.0000000000, -0.7866666667),
    (0.6493333333, -0.1572666667),
    (0.5479408333, -0.0903586667),
    (0.5015224014, 0.0231509539),
]
DR_RELAXED = [
    (1.0000000000, -0.6666666667),
    (0.2737588652, 0.2765957447),
    (0.1148463357, 0.2489361702),
    (0.0822066294, 0.3430325436),
]
DR_RELAXED_L1 = [
    (0.9500000000, -0.6166666667),
    (0.2039716312, 0.2348936170),
    (0.0304917258, 0.2144042553),
    (0.0052579347, 0.2952426689),
]
AVG_UNIFORM = [
    (1.0000000000, -0.6400000000),
    (0.6997000000, -0.2793000000),
    (0.5966181250, -0.0728045000),
    (0.3845155278, 0.0801338031),
]
AVG_UNLIKE = [
    (1.0000000000, -0.6400000000),
    (0.6981400000, -0.3064400000),
    (0.6639442429, -0.1344170286),
    (0.4330096235, 0.0243509036),
]
PROX_TWO_STEPS = [
    (1.0000000000, -0.6600000000),
    (0.7164000000, -0.3130250000),
    (0.6162905000, -0.1046847500),
    (0.4116672363, 0.0445935531),
]
PROX_EXACT = [
    (1.0000000000, -0.3333333333),
    (0.1449275362, 0.2137681159),
    (0.0012077295, 0.1873490338),
    (-0.1028276623, 0.6193814325),
]

TABLE = {
    "FedADMM, partial": (FedADMM(eta=2.0), ALIKE, PARTIAL, EXACT, ADMM_PARTIAL),
    "FedADMM, partial, l1": (FedADMM(eta=2.0, g=L1(0.1)), ALIKE, PARTIAL, EXACT, ADMM_L1),
    "FedADMM, partial, box": (FedADMM(eta=2.0, g=Box(-0.2, 0.2)), ALIKE, PARTIAL, EXACT, ADMM_BOX),
    "FedADMM, full": (FedADMM(eta=2.0), ALIKE, FULL, EXACT, DOUGLAS_RACHFORD_FULL),
    "FedADMM, partial, unlike": (FedADMM(eta=2.0, weights="samples"), UNLIKE, PARTIAL, EXACT, ADMM_UNLIKE),
    "FedADMM, two steps from local": (FedADMM(eta=2.0, start="local"), ALIKE, PARTIAL, TWO_STEPS, ADMM_FROM_LOCAL),
    "FedADMM, two steps from server": (FedADMM(eta=2.0, start="server"), ALIKE, PARTIAL, TWO_STEPS, ADMM_FROM_SERVER),
    "FedADMM, two steps from centre": (FedADMM(eta=2.0, start="centre"), ALIKE, PARTIAL, TWO_STEPS, ADMM_FROM_CENTRE),
    "FedADMM, two steps by default": (FedADMM(eta=2.0), ALIKE, PARTIAL, TWO_STEPS, ADMM_FROM_SERVER),
    "FedDR, two steps by default": (FedDR(eta_hat=0.5), ALIKE, PARTIAL, TWO_STEPS, ADMM_FROM_SERVER),
    "FedDRII, two steps by default": (FedDRII(eta_hat=0.5), ALIKE, PARTIAL, TWO_STEPS, ADMM_FROM_SERVER),
    "FedADMM, alpha 1.5": (FedADMM(eta=2.0, alpha=1.5), ALIKE, PARTIAL, EXACT, DR_RELAXED),
    "FedADMM, alpha 1.5, l1": (FedADMM(eta=2.0, alpha=1.5, g=L1(0.1)), ALIKE, PARTIAL, EXACT, DR_RELAXED_L1),
    "FedADMM, alpha 2, full": (FedADMM(eta=2.0, alpha=2.0), ALIKE, FULL, EXACT, PEACEMAN_RACHFORD_FULL),
    "FedDR, alpha 1.5": (FedDR(eta_hat=0.5, alpha=1.5), ALIKE, PARTIAL, EXACT, DR_RELAXED),
    "FedDR, alpha 1.5, l1": (FedDR(eta_hat=0.5, alpha=1.5, g=L1(0.1)), ALIKE, PARTIAL, EXACT, DR_RELAXED_L1),
    "FedDR, full": (FedDR(eta_hat=0.5), ALIKE, FULL, EXACT, DOUGLAS_RACHFORD_FULL),
    "FedDR, alpha 2, full": (FedDR(eta_hat=0.5, alpha=2.0), ALIKE, FULL, EXACT, PEACEMAN_RACHFORD_FULL),
    "FedAvg, uniform": (FedAvg(weights="uniform"), UNLIKE, PARTIAL, TWO_STEPS, AVG_UNIFORM),
    "FedAvg, samples": (FedAvg(weights="samples"), UNLIKE, PARTIAL, TWO_STEPS, AVG_UNLIKE),
    "FedProx, two steps": (FedProx(mu=1.0, weights="uniform"), UNLIKE, PARTIAL, TWO_STEPS, PROX_TWO_STEPS),
    "FedProx, exact": (FedProx(mu=1.0, weights="uniform"), UNLIKE, PARTIAL, EXACT, PROX_EXACT),
}


@pytest.mark.parametrize("row", TABLE)
def test_models_after_each_of_four_rounds_are_those_of_the_table(row):
    algorithm, samples, cohorts, solver, expected = TABLE[row]
    clients, x0 = golden(samples)
    history = simulate(algorithm, clients, x0, cohorts=cohorts, solver=solver)
    close([s.x_bar.numpy() for s in history.server], [(1.0, -1.0), *expected], 1e-9)


def test_clients_of_fedadmm_remember_the_points_and_duals_of_the_table():
    clients, x0 = golden()
    history = simulate(FedADMM(eta=2.0), clients, x0, cohorts=PARTIAL)
    x = {
        0: [(1, -1), (1, -1), (1, -1)],
        1: [(1, -0.5), (1, -1), (1, -1)],
        2: [(1, -0.5), (0.524822695, -0.1985815603), (0.4, -0.0666666667)],
        4: [(0.52214342, -0.1161938534), (0.3110735543, 0.1329823561), (0.306572104, 0.0670449173)],
    }
    z = {
        0: [(0, 0), (0, 0), (0, 0)],
        1: [(0, 1), (0, 0), (0, 0)],
        2: [(0, 1), (-0.9503546099, 0.9361702128), (-1.2, 1.2)],
        4: [(0.47785658, 0.2323877069), (-0.6886382867, 0.7114808667), (-1.153286052, 0.7988652482)],
    }
    for k in x:
        states = history.clients[k]
        close([s.x_i.numpy() for s in states], [[float(v) for v in p] for p in x[k]], 1e-9)
        close([s.z_i.numpy() for s in states], [[float(v) for v in p] for p in z[k]], 1e-9)


@pytest.mark.parametrize("algorithm", [FedADMM(eta=2.0), FedDR(eta_hat=0.5, alpha=1.5)], ids=repr)
def test_long_runs_reach_the_minimiser_of_the_mean(algorithm):
    clients, x0 = golden()
    history = simulate(algorithm, clients, x0, cohorts=PARTIAL * 100)
    close(history.x_bar.numpy(), [-0.0481927711, 0.3373493976], 1e-9)


def test_the_references_of_these_tests_reproduce_the_table_too():
    clients, x0 = golden()
    problem, x0 = in_numpy(clients), x0.numpy()
    w = [0.5, 0.3, 0.2]
    two = references.descent(2, 0.1)
    runs = [
        (references.fedadmm(problem, x0, PARTIAL, 2.0, prox=references.soft(0.1)), ADMM_L1),
        (references.fedadmm(problem, x0, PARTIAL, 2.0, prox=references.clip(-0.2, 0.2)), ADMM_BOX),
        (references.fedadmm(problem, x0, PARTIAL, 2.0, w=w), ADMM_UNLIKE),
        (references.fedadmm(problem, x0, PARTIAL, 2.0, start="centre", solve=two), ADMM_FROM_CENTRE),
        (references.feddr(problem, x0, PARTIAL, 0.5, 1.5, references.soft(0.1)), DR_RELAXED_L1),
        (references.fedprox(problem, x0, PARTIAL, 0.0, (5, 3, 2), solve=two), AVG_UNLIKE),
        (references.fedprox(problem, x0, PARTIAL, 1.0), PROX_EXACT),
    ]
    for rows, expected in runs:
        close([row.x_bar for row in rows[1:]], expected, 1e-9)

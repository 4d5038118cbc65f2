"""What was projected is inside, whatever the precision: rounding alone makes no model infeasible."""

import pytest
import torch
from helpers.problems import LAW, golden, name_of, random_clients, seeds, solver_for
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import GradientDescent, simulate
from lightning_fed.algorithms import FedADMM, FedDR, FedDRII, FedDualAvg, FedMid
from lightning_fed.prox import (
    L1,
    Affine,
    Box,
    Intersection,
    L1Ball,
    L2Ball,
    NonNegative,
    Scaled,
    Simplex,
    Sum,
    Translated,
)

D = 40
KINDS = {
    "Box": lambda a, b, s: Box(a, a + b),
    "point": lambda a, b, s: Box(a, a),
    "Simplex": lambda a, b, s: Simplex(b),
    "L1Ball": lambda a, b, s: L1Ball(b),
    "L2Ball": lambda a, b, s: L2Ball(b),
    "Affine": lambda a, b, s: Affine([[1.0] * D], [a]),
    "Intersection": lambda a, b, s: Intersection([Box(-b, b), NonNegative()]),
    "L1 in a Box": lambda a, b, s: Sum([L1(0.1), Box(a, a + b)]),
    "scaled": lambda a, b, s: Scaled(Sum([L1(0.1), Box(a, a + b)]), 3.0),
    "translated Box": lambda a, b, s: Translated(Box(a, a + b), s),
    "translated NonNegative": lambda a, b, s: Translated(NonNegative(), s),
    "translated Simplex": lambda a, b, s: Translated(Simplex(b), s),
    "translated L2Ball": lambda a, b, s: Translated(L2Ball(b), s),
    "translated L1 in a Box": lambda a, b, s: Translated(Sum([L1(0.1), Box(a, a + b)]), s),
}
INF = float("inf")


@pytest.mark.parametrize("kind", KINDS)
@given(seeds, st.floats(-2, 2), st.floats(0.05, 2), st.sampled_from([0.1, -0.7, 3.3, 100.1]))
@LAW
def test_a_projection_is_feasible_in_its_own_precision_after_a_cast_and_on_average(kind, seed, a, b, s):
    g = KINDS[kind](a, b, s)
    v = 3 * torch.randn(5, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for p in (g.prox(v, 0.3), g.prox(v, 0.3).float(), g.prox(v.float(), 0.3)):
        assert (g(p) < INF).all()
    mean = g.prox(v.float(), 0.3).double().mean(0)
    assert g(g.prox(mean, 0.3).float()) < INF
    off = torch.zeros(D, dtype=torch.float64)
    off[0] = -500.0  # and what is outside is
    assert g(off) == g(off.float()) == INF


GS = [
    Box(-0.3, 0.1),
    Simplex(0.7),
    L2Ball(0.3),
    L1Ball(0.7),
    Translated(Box(-0.3, 0.1), 0.1),
    Sum([L1(0.1), NonNegative()]),
]


@pytest.mark.parametrize("kind", [FedADMM, FedDR, FedDRII, FedMid, FedDualAvg])
@pytest.mark.parametrize("g", GS, ids=name_of)
def test_single_precision_models_have_a_finite_g_from_the_first_round_on(kind, g):
    algorithm = kind(g=g, **({"eta": 6.0} if kind is FedADMM else {"eta_hat": 0.2} if kind in (FedDR, FedDRII) else {}))
    clients, x0 = random_clients(8, n=4, d=5)
    history = simulate(algorithm, clients, 3 * x0.float(), rounds=12, solver=solver_for(algorithm))
    for server in history.server[1:]:
        assert server.x_bar.dtype == torch.float32
        assert algorithm.g(server.x_bar) < INF


def test_an_l1_norm_in_an_interval_reaches_the_minimum_of_the_sum():
    clients, x0 = golden()
    g = Sum([L1(0.1), NonNegative()])
    x = x0
    for _ in range(4000):  # projected gradient; inside, the norm is a sum of entries
        x = (x - 0.1 * (sum(f.grad(x) for f in clients) / 3 + 0.1)).clamp(min=0)
    ours = simulate(FedADMM(eta=4.0, g=g), clients, x0, rounds=400).x_bar
    assert torch.allclose(ours, x, atol=1e-10, rtol=0)
    assert x[0] == 0
    steps = simulate(FedMid(g=g), clients[:1], x0, rounds=1, solver=GradientDescent(1, 0.1)).x_bar
    once = (x0 - 0.1 * clients[0].grad(x0) - 0.01).clamp(min=0)
    assert torch.allclose(steps, (once - 0.01).clamp(min=0), atol=1e-15)

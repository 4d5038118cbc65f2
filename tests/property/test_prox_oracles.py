"""The proximal operators against those who know nothing of them: a general solver, and the library PyProximal."""

import numpy as np
import pytest
import torch
from helpers.problems import close

from lightning_fed.core.layout import Layout
from lightning_fed.prox import (
    L1,
    L2,
    Affine,
    Box,
    ElasticNet,
    GroupLasso,
    Intersection,
    L1Ball,
    L2Ball,
    LInf,
    NonNegative,
    Nuclear,
    Simplex,
    SquaredL2,
)

ROWS = np.array([[1.0, 2.0, -1.0, 0.0], [0.0, 1.0, 1.0, 3.0]])
MATRIX = Layout(("weight",), ((2, 2),), torch.float64)
T = 0.7


def vectors(seed, count=4, d=4):
    return 2 * np.random.default_rng(seed).normal(size=(count, d))


def ours(g, v, t=T):
    return g.bind(MATRIX).prox(torch.as_tensor(v), t)


# --- smooth problems with the same solution, in variables w of which x = take(w) ------------------------------------


def split(cost, most=None):
    """x = a - b with a, b >= 0, where the 1-norm is a sum; ``cost`` of (a, b), whose sum is at most ``most``."""
    d = 4
    rules = [] if most is None else [{"type": "ineq", "fun": lambda w: most - w.sum()}]
    return lambda w: w[:d] - w[d:], cost, rules, [(0, None)] * 2 * d, np.full(2 * d, 0.1)


def bounded(c, below):
    """c times a bound s = w[-1] on a norm, which ``below`` keeps below s."""
    rules = [{"type": "ineq", "fun": lambda w: below(w[:-1], w[-1])}]
    return lambda w: w[:-1], lambda w: c * w[-1], rules, [(None, None)] * 4 + [(0, None)], np.array([0.1] * 4 + [1.0])


def constrained(*rules, bounds=(None, None)):
    return lambda w: w, lambda w: 0.0, [dict(zip(("type", "fun"), r, strict=True)) for r in rules], [bounds] * 4, ONES


def rows_bounded():
    """Two groups of two, each with its bound."""
    rules = [
        {"type": "ineq", "fun": lambda w, k=k: w[4 + k] ** 2 - w[2 * k : 2 * k + 2] @ w[2 * k : 2 * k + 2]}
        for k in (0, 1)
    ]
    bounds = [(None, None)] * 4 + [(0, None)] * 2
    return lambda w: w[:4], lambda w: 0.8 * np.sqrt(2) * (w[4] + w[5]), rules, bounds, np.array([0.1] * 4 + [1.0, 1.0])


def factors(c):
    """X = U V^T, whose nuclear norm is the least (|U|^2 + |V|^2) / 2."""
    start = np.random.default_rng(0).normal(size=8)
    return lambda w: (w[:4].reshape(2, 2) @ w[4:].reshape(2, 2)).ravel(), lambda w: c * w @ w / 2, [], None, start


ONES = np.full(4, 0.3)
TOTAL = ("eq", lambda x: x.sum() - 1)
DISC = ("ineq", lambda x: 1 - x @ x)
PROBLEMS = {
    L1(0.9): split(lambda w: 0.9 * w.sum()),
    SquaredL2(0.9): (lambda w: w, lambda w: 0.45 * w @ w, [], None, ONES),
    ElasticNet(0.9, 0.5): split(lambda w: 0.9 * w.sum() + 0.25 * (w[:4] - w[4:]) @ (w[:4] - w[4:])),
    L2(0.9): bounded(0.9, lambda x, s: s**2 - x @ x),
    LInf(1.2): bounded(1.2, lambda x, s: np.concatenate([s - x, s + x])),
    GroupLasso(0.8, by="row"): rows_bounded(),
    Nuclear(0.6): factors(0.6),
    Nuclear(2.0): factors(2.0),
    Box(-0.5, 1.0): constrained(bounds=(-0.5, 1.0)),
    NonNegative(): constrained(bounds=(0, None)),
    L2Ball(1.0): constrained(DISC),
    L1Ball(1.5): split(lambda w: 0.0, most=1.5),
    Simplex(1.0): constrained(TOTAL, bounds=(0, None)),
    Affine(ROWS, [1.0, -2.0]): constrained(("eq", lambda x: ROWS @ x - [1.0, -2.0])),
    Intersection([L2Ball(1.0), Box(-0.2, 0.7)]): constrained(DISC, bounds=(-0.2, 0.7)),
    Intersection([Affine([[1.0] * 4], [1.0]), NonNegative()]): constrained(TOTAL, bounds=(0, None)),
    Intersection([Box(-0.5, 0.6), Affine([[1.0] * 4], [1.0]), L2Ball(1.0)]): constrained(
        TOTAL, DISC, bounds=(-0.5, 0.6)
    ),
}


@pytest.mark.parametrize("g", PROBLEMS, ids=lambda g: f"{g!r:.50}")
def test_a_general_solver_finds_the_same_point(g):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy comes with pyproximal, in the dev extra")
    take, cost, rules, bounds, start = PROBLEMS[g]
    for v in vectors(21):
        found = optimize.minimize(
            lambda w, v=v: cost(w) + (take(w) - v) @ (take(w) - v) / (2 * T),
            start,
            method="SLSQP" if rules or bounds else "BFGS",
            constraints=rules,
            bounds=bounds,
            options={"maxiter": 500, **({"ftol": 1e-14} if rules or bounds else {"gtol": 1e-9})},
        )
        close(ours(g, v), take(found.x), 1e-5)


@pytest.fixture(scope="module")
def outside():
    return pytest.importorskip("pyproximal", reason="pyproximal is in the dev extra")


@pytest.mark.parametrize(
    ("g", "theirs"),
    [
        (L1(0.9), lambda p: p.L1(0.9)),
        (SquaredL2(0.9), lambda p: p.L2(sigma=0.9)),
        (L2(0.9), lambda p: p.Euclidean(0.9)),
        (L2(9.0), lambda p: p.Euclidean(9.0)),
        (GroupLasso(0.9, by="row", weight="one"), lambda p: Turned(p.L21(2, 0.9))),
        (Nuclear(0.6), lambda p: p.Nuclear((2, 2), 0.6)),
        (Nuclear(2.0), lambda p: p.Nuclear((2, 2), 2.0)),
        (Box(-0.5, 1.0), lambda p: p.Box(-0.5, 1.0)),
        (L2Ball(1.0), lambda p: p.EuclideanBall(0.0, 1.0)),
        (L1Ball(1.5), lambda p: p.L1Ball(4, 1.5, xtol=1e-13)),
        (Simplex(1.0), lambda p: p.Simplex(4, 1.0, xtol=1e-13)),
        (Affine(ROWS, [1.0, -2.0]), lambda p: p.AffineSet(matrix(ROWS), np.array([1.0, -2.0]), 50)),
    ],
    ids=lambda value: f"{value!r:.50}" if not callable(value) or hasattr(value, "prox") else "",
)
def test_pyproximal_agrees(outside, g, theirs):
    for v in vectors(22, 20):
        close(ours(g, v), theirs(outside).prox(v.copy(), T), 1e-9)


class Turned:
    """PyProximal's groups are columns, ours rows."""

    def __init__(self, columns):
        self.columns = columns

    def prox(self, v, t):
        return self.columns.prox(v.reshape(2, 2).T.ravel(), t).reshape(2, 2).T.ravel()


def matrix(rows):
    import pylops

    return pylops.MatrixMult(rows)

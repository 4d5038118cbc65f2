"""Regularisers and constraints: laws over one list `PROXES`, then numbers."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import LAW, close, seeds

from lightning_fed.prox import L1, Box, Prox, SquaredL2, Zero

#: A new regulariser is enrolled in every law by one line here.
PROXES = [Zero(), L1(0.7), L1(0.0), SquaredL2(1.3), SquaredL2(0.0), Box(-0.5, 0.8), Box(0.3, 0.3), Box(1.0, 4.0)]
INDICATORS = [g for g in PROXES if g.indicator]

every_g = pytest.mark.parametrize("g", PROXES, ids=repr)
every_set = pytest.mark.parametrize("g", INDICATORS, ids=repr)
steps = st.floats(0.1, 2.0)
V = torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0], dtype=torch.float64)


def vectors(seed, count, d=6, spread=2.0):
    """Random vectors, some of whose entries are 0 or tiny."""
    rng = np.random.default_rng(seed)
    draws = rng.normal(size=(count, d)) * rng.choice([0.0, 0.1, 1.0, 1.0], size=(count, d))
    return torch.as_tensor(spread * draws)


def points_of(g, seed, count=20):
    """Random points where g is finite."""
    return [g.prox(v, 1.0) if g.indicator else v for v in vectors(seed, count)]


def conjugate_prox(g, u, s):
    """prox of s times the convex conjugate of g, from the formula of the conjugate."""
    match g:
        case Zero():  # the indicator of {0}
            return torch.zeros_like(u)
        case L1(c):  # the indicator of the dual ball
            return torch.maximum(torch.minimum(u, torch.full_like(u, c)), torch.full_like(u, -c))
        case SquaredL2(c):  # |y|^2 / (2c), the indicator of {0} for c = 0
            return u * (c / (c + s)) if c else torch.zeros_like(u)
        case Box(lo, hi):  # sum of max(lo y, hi y)
            right, left = u - s * hi, u - s * lo
            return torch.where(right > 0, right, torch.where(left < 0, left, torch.zeros_like(u)))
    raise AssertionError(f"no conjugate for {g}")


@every_g
@given(seeds, steps)
@LAW
def test_prox_is_firmly_non_expansive(g, seed, t):
    u, v = vectors(seed, 2)
    p, q = g.prox(u, t), g.prox(v, t)
    assert (p - q) @ (p - q) <= (p - q) @ (u - v) + 1e-12


@every_g
@given(seeds, steps)
@LAW
def test_prox_beats_every_other_point(g, seed, t):
    (v,) = vectors(seed, 1)
    p = g.prox(v, t)

    def objective(x):
        return g(x) + (x - v).square().sum() / (2 * t)

    others = points_of(g, seed + 1) + [p + 1e-3 * y for y in vectors(seed + 2, 20)] + [v]
    assert all(objective(p) <= objective(y) + 1e-12 for y in others)


@every_g
@given(seeds, steps)
@LAW
def test_residual_is_a_subgradient_at_the_prox(g, seed, t):
    (v,) = vectors(seed, 1)
    p = g.prox(v, t)
    s = (v - p) / t
    assert g(p) < float("inf")
    assert all(g(y) >= g(p) + s @ (y - p) - 1e-11 for y in points_of(g, seed + 1))


@given(seeds, steps, st.floats(0.01, 3.0))
@LAW
def test_residual_of_l1_has_the_signs_of_the_prox(seed, t, c):
    (v,) = vectors(seed, 1)
    p = L1(c).prox(v, t)
    s = (v - p) / t
    close(s[p != 0], c * p[p != 0].sign(), 1e-12)
    assert (s[p == 0].abs() <= c + 1e-12).all()


@every_g
@given(seeds, steps)
@LAW
def test_moreau_decomposes_every_vector(g, seed, t):
    (v,) = vectors(seed, 1)
    close(g.prox(v, t) + t * conjugate_prox(g, v / t, 1 / t), v, 1e-12)


@every_set
@given(seeds, steps, steps)
@LAW
def test_projections_are_idempotent_and_ignore_the_step(g, seed, t, s):
    (v,) = vectors(seed, 1)
    p = g.prox(v, t)
    assert torch.equal(g.prox(p, t), p)
    assert torch.equal(g.prox(v, s), p)
    assert g(p) == 0


@pytest.mark.parametrize("g", [g for g in PROXES if not g.indicator], ids=repr)
def test_a_vanishing_step_gives_the_vector_back(g):
    close(g.prox(V, 1e-12), V, 1e-11)


@every_set
def test_a_vanishing_step_still_projects(g):
    assert torch.equal(g.prox(V, 1e-12), g.prox(V, 1.0))


def minimiser(g, v, t):
    """The prox of one number by five grids, each around the best point of the one before."""
    centre, width = 0.0, 8.0
    for _ in range(5):
        grid = torch.linspace(centre - width, centre + width, 4001, dtype=torch.float64)
        kinks = [0.0, getattr(g, "lo", 0.0), getattr(g, "hi", 0.0)]
        grid = torch.cat([grid, torch.tensor(kinks, dtype=torch.float64)])
        values = g(grid.unsqueeze(-1)) + (grid - v) ** 2 / (2 * t)
        centre, width = float(grid[values.argmin()]), width / 500
    return centre


@every_g
@pytest.mark.parametrize("t", [0.1, 0.7, 2.0])
def test_a_search_that_knows_only_the_value_finds_the_same_prox(g, t):
    v = torch.tensor([-3.0, -1.1, -0.4, 0.0, 0.05, 0.6, 0.9, 2.7, 5.0], dtype=torch.float64)
    close(g.prox(v, t), [minimiser(g, float(x), t) for x in v], 1e-6)


@every_g
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_precision_is_kept_and_the_input_is_not_modified(g, dtype):
    v = V.to(dtype)
    before = v.clone()
    assert g.prox(v, 0.5).dtype == dtype
    assert g(v).dtype == dtype
    assert torch.equal(v, before)


@every_g
def test_leading_dimensions_are_separate_vectors(g):
    v = vectors(3, 8).reshape(2, 4, 6)
    together, values = g.prox(v, 0.6), g(v)
    assert values.shape == (2, 4)
    for i in range(2):
        for j in range(4):
            assert torch.equal(together[i, j], g.prox(v[i, j], 0.6))
            assert g(v[i, j]).ndim == 0
            assert values[i, j] == pytest.approx(float(g(v[i, j])))


@pytest.mark.parametrize(
    ("g", "t", "expected"),
    [
        (Zero(), 1.0, (3, -1, 0.5, 0, -2)),
        (L1(1.0), 1.0, (2, 0, 0, 0, -1)),
        (L1(2.0), 0.5, (2, 0, 0, 0, -1)),
        (SquaredL2(1.0), 1.0, (1.5, -0.5, 0.25, 0, -1)),
        (SquaredL2(0.5), 2.0, (1.5, -0.5, 0.25, 0, -1)),
        (Box(-1.0, 1.0), 1.0, (1, -1, 0.5, 0, -1)),
    ],
    ids=str,
)
def test_prox_of_the_vector_of_the_specification(g, t, expected):
    close(g.prox(V, t), [float(x) for x in expected], 0)


def test_values_are_those_of_the_definitions():
    assert Zero()(V) == 0
    assert L1(2.0)(V) == 13.0
    assert SquaredL2(2.0)(V) == 14.25
    assert Box(-2.0, 3.0)(V) == 0
    assert Box(-1.9, 3.0)(V) == float("inf")
    assert Box(-2.0, 2.9)(V) == float("inf")


def test_only_constraints_call_themselves_indicators():
    assert [type(g).__name__ for g in (Zero(), L1(), SquaredL2(), Box()) if g.indicator] == ["Box"]


def test_borders_may_be_infinite():
    close(Box(0.0, float("inf")).prox(V, 1.0), [3, 0, 0.5, 0, 0], 0)
    assert Box(0.0, float("inf"))(V.abs()) == 0


@pytest.mark.parametrize("kind", [L1, SquaredL2])
@pytest.mark.parametrize("c", [-1.0, -1e-300, float("nan"), float("inf"), "1", None, True, [1.0]], ids=repr)
def test_a_strength_that_is_no_finite_non_negative_number_is_refused(kind, c):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}\.c must be a finite number >= 0, got ") as refusal:
        kind(c)
    assert repr(c) in str(refusal.value)


@pytest.mark.parametrize(("lo", "hi"), [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("nan"))])
def test_a_box_without_inside_is_refused(lo, hi):
    with pytest.raises(ValueError, match=f"Box needs lo <= hi, got lo={lo!r}, hi={hi!r}"):
        Box(lo, hi)


def test_regularisers_are_frozen_and_abstract_ones_cannot_be_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        L1(1.0).c = 2.0
    assert L1(1.0) == L1(1.0) != L1(2.0)
    with pytest.raises(TypeError, match="abstract"):
        Prox()

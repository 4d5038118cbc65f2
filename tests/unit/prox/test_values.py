"""Regularisers and constraints: the numbers of the specification."""

import math

import pytest
import torch
from helpers.problems import close
from helpers.prox_references import MATRIX, V, matrices

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
    Scaled,
    Simplex,
    SquaredL2,
    Sum,
    Translated,
    Zero,
)

INF = float("inf")


@pytest.mark.parametrize(
    ("g", "t", "expected"),
    [
        (Zero(), 1.0, (3, -1, 0.5, 0, -2)),
        (L1(1.0), 1.0, (2, 0, 0, 0, -1)),
        (L1(2.0), 0.5, (2, 0, 0, 0, -1)),
        (SquaredL2(1.0), 1.0, (1.5, -0.5, 0.25, 0, -1)),
        (SquaredL2(0.5), 2.0, (1.5, -0.5, 0.25, 0, -1)),
        (L2(1.0), 1.0, (2.205281, -0.735094, 0.367547, 0, -1.470187)),
        (L2(4.0), 0.25, (2.205281, -0.735094, 0.367547, 0, -1.470187)),
        (L2(4.0), 1.0, (0, 0, 0, 0, 0)),
        (ElasticNet(0.5, 1.0), 1.0, (1.25, -0.25, 0, 0, -0.75)),
        (ElasticNet(0.25, 0.5), 2.0, (1.25, -0.25, 0, 0, -0.75)),
        (LInf(1.0), 1.0, (2, -1, 0.5, 0, -2)),
        (LInf(2.5), 1.0, (1.25, -1, 0.5, 0, -1.25)),
        (LInf(5.0), 0.5, (1.25, -1, 0.5, 0, -1.25)),
        (LInf(7.0), 1.0, (0, 0, 0, 0, 0)),
        (Box(-1.0, 1.0), 1.0, (1, -1, 0.5, 0, -1)),
        (NonNegative(), 1.0, (3, 0, 0.5, 0, 0)),
        (L2Ball(2.0), 1.0, (1.589439, -0.529813, 0.264906, 0, -1.059626)),
        (L1Ball(2.0), 1.0, (1.5, 0, 0, 0, -0.5)),
        (L1Ball(4.0), 1.0, (2.333333, -0.333333, 0, 0, -1.333333)),
        (L1Ball(6.5), 1.0, (3, -1, 0.5, 0, -2)),
        (Simplex(1.0), 1.0, (1, 0, 0, 0, 0)),
        (Affine([[1.0] * 5], [1.0]), 1.0, (3.1, -0.9, 0.6, 0.1, -1.9)),
        (Affine([[1.0] * 5, [2.0] * 5], [1.0, 2.0]), 1.0, (3.1, -0.9, 0.6, 0.1, -1.9)),
        (Scaled(L1(2.0), 0.5), 1.0, (2, 0, 0, 0, -1)),
        (Translated(Box(-1.0, 1.0), 1.0), 1.0, (2, 0, 0.5, 0, 0)),
        (Translated(L1(1.0), [3.0, 0.0, 0.0, -2.0, 0.0]), 1.0, (3, 0, 0, -1, -1)),
        (Intersection([NonNegative(), Affine([[1.0] * 5], [1.0])]), 1.0, (1, 0, 0, 0, 0)),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_prox_of_the_vector_of_the_specification(g, t, expected):
    close(g.prox(V, t), [float(value) for value in expected], 6e-7)


def test_prox_of_the_matrix_of_the_specification():
    g = Nuclear(1.0).bind(matrices(2, 2))
    close(g.prox(MATRIX, 1.0), [2.105573, 0.447214, 3.552786, 4.105573], 6e-7)
    close(g(MATRIX), 6.708204 + 2.236068, 1e-6)


def test_values_are_those_of_the_definitions():
    assert Zero()(V) == 0
    assert L1(2.0)(V) == 13.0
    assert SquaredL2(2.0)(V) == 14.25
    assert ElasticNet(2.0, 2.0)(V) == 27.25
    assert L2(2.0)(V) == pytest.approx(2 * math.sqrt(14.25))
    assert LInf(2.0)(V) == 6.0
    assert Scaled(L1(2.0), 3.0)(V) == 39.0
    assert Translated(L1(1.0), 1.0)(V) == 2 + 2 + 0.5 + 1 + 3


@pytest.mark.parametrize(
    ("g", "inside", "outside"),
    [
        (Box(-2.0, 3.0), V, V - 0.001),
        (Box(-2.0, 3.0), V, V + 0.001),
        (Box(0.0, INF), V.abs(), V),
        (NonNegative(), V.abs(), V),
        (L2Ball(math.sqrt(14.25)), V, 1.000001 * V),
        (L1Ball(6.5), V, 1.000001 * V),
        (Simplex(6.5), V.abs(), 1.000001 * V.abs()),
        (Simplex(6.5), V.abs(), 0.999999 * V.abs()),
        (Simplex(0.5), torch.tensor([0.5, 0.0, 0.0]), torch.tensor([1.0, -0.5, 0.0])),
        (Affine([[1.0] * 5], [0.5]), V, V + 1e-6),
        (Translated(NonNegative(), -2.0), V, V - 0.001),
        (Scaled(NonNegative(), 2.0), V.abs(), V),
        (Intersection([NonNegative(), L1Ball(6.5)]), V.abs(), 1.01 * V.abs()),
        (Intersection([NonNegative(), L1Ball(6.5)]), V.abs(), V),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_constraints_are_0_inside_and_infinite_outside(g, inside, outside):
    assert g.indicator
    assert g(inside) == 0
    assert g(outside) == INF
    assert g(torch.full_like(inside, float("nan"))) == INF
    assert torch.stack([inside, outside]).shape[:-1] == g(torch.stack([inside, outside])).shape


def test_only_constraints_call_themselves_indicators():
    kinds = (Zero(), L1(), SquaredL2(), L2(), ElasticNet(), LInf(), GroupLasso(), Nuclear(), Scaled(L1()))
    assert not any(g.indicator for g in kinds)
    assert Sum([Box(on="a"), L2Ball(on="b")]).indicator
    assert not Sum([Box(on="a"), L2(on="b")]).indicator


def test_borders_may_be_infinite():
    close(Box(0.0, INF).prox(V, 1.0), [3, 0, 0.5, 0, 0], 0)


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6, 1e12])
def test_a_large_common_part_costs_the_simplex_no_digits(offset):
    p = Simplex(1.0).prox(torch.tensor([0.7, 0.43, -1.0], dtype=torch.float64) + offset, 1.0)
    close(p.sum(), 1.0, 1e-15)
    close(p, [0.635, 0.365, 0.0], 1e-15 * max(1, abs(offset)))


def test_dykstra_finds_the_nearest_common_point_where_projecting_in_turn_does_not():
    disc, box, v = L2Ball(1.0), Box(0.0, 0.8), torch.tensor([3.0, 1.0], dtype=torch.float64)
    close(Intersection([disc, box]).prox(v, 1.0), [0.8, 0.6], 1e-9)
    assert (box.prox(disc.prox(v, 1.0), 1.0) - torch.tensor([0.8, 0.6])).norm() > 0.1


def test_dykstra_goes_on_where_it_pauses():
    """Two sets between which x stays put for many sweeps before it moves on, because one p_k has to be used up."""
    square, line = Box(-1.0, 1.0), Affine([[1.0, 0.5]], [1.5])
    v = torch.tensor([-50.0, 60.0], dtype=torch.float64)
    p = Intersection([square, line]).prox(v, 1.0)
    close(p, [1.0, 1.0], 1e-8)


def test_dykstra_says_when_it_has_not_arrived():
    apart = Intersection([Box(0.0, 1.0), Translated(L2Ball(1.0), 5.0)], max_iterations=20)
    with pytest.warns(UserWarning, match="not reached the nearest point after 20 sweeps.*have a common point"):
        apart.prox(V, 1.0)

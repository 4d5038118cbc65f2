"""Laws of every regulariser and constraint, over one list `PROXES`; a law sees a batch of vectors at a time.

The references know nothing of the package: they find their own entries by name, and find thresholds by bisection.
"""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers.problems import close
from helpers.prox_references import LAYOUT, D, conjugate_prox, where

from lightning_fed.core import hyper_parameters
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

WEIGHTS = "*.weight"
ROWS = np.random.default_rng(5).normal(size=(3, D))
ROWS[2] = ROWS[0] - 2 * ROWS[1]  # the third equation follows from the others
POINT = np.linspace(-1, 1, D)

#: A new regulariser is enrolled in every law by one line here (and by one in `conjugate_prox`).
PROXES = [
    Zero(),
    L1(0.7),
    L1(0.0),
    L1(0.7, on=WEIGHTS),
    SquaredL2(1.3),
    SquaredL2(0.0),
    SquaredL2(1.3, on=["conv.*", "scale"]),
    L2(0.9),
    L2(0.0),
    L2(4.0),
    L2(0.9, on=WEIGHTS),
    L2(0.9, on=WEIGHTS, scope="per_tensor"),
    L2(0.6, scope="per_tensor"),
    ElasticNet(0.4, 0.8),
    ElasticNet(0.0, 0.8),
    ElasticNet(0.4, 0.0, on="*.bias"),
    GroupLasso(0.5),
    GroupLasso(0.4, on=WEIGHTS, by="filter"),
    GroupLasso(0.4, by="row"),
    GroupLasso(0.9, on=["*", "!*.bias"], by="row", weight="one"),
    LInf(1.1),
    LInf(0.0),
    LInf(9.0),
    LInf(1.1, on="head.*", scope="per_tensor"),
    Nuclear(0.6, on=WEIGHTS),
    Nuclear(0.0, on="head.weight"),
    Box(-0.5, 0.8),
    Box(0.3, 0.3),
    Box(1.0, 4.0),
    Box(-1, 0.5, on="*.bias"),
    NonNegative(),
    NonNegative(on="scale"),
    L2Ball(1.5),
    L2Ball(0.5, on="head.*", scope="per_tensor"),
    L2Ball(100.0),
    L1Ball(2.0),
    L1Ball(1.0, on=WEIGHTS, scope="per_tensor"),
    L1Ball(100.0),
    Simplex(1.0),
    Simplex(3.0, on="conv.*"),
    Simplex(0.5, on=WEIGHTS, scope="per_tensor"),
    Affine(ROWS[:2], ROWS[:2] @ POINT),
    Affine(ROWS, ROWS @ POINT),
    Affine([[1.0] * 6], [1.0], on="head.weight"),
    Scaled(L1(0.7), 0.5),
    Scaled(GroupLasso(0.4, on=WEIGHTS, by="row"), 2.0),
    Scaled(L2Ball(1.0), 3.0),
    Translated(L2(0.9), POINT),
    Translated(L1(0.9, on=WEIGHTS), POINT),
    Translated(Simplex(1.0), 0.5),
    Sum([L1(0.3, on=WEIGHTS), Box(-1, 1, on="*.bias")]),
    Sum([Nuclear(0.4, on=WEIGHTS), Scaled(L2(0.5, on="*.bias", scope="per_tensor"), 2.0), SquaredL2(1.0, on="scale")]),
    Sum([L2Ball(1.0, on="conv.*"), Simplex(1.0, on="head.*")]),
    Sum([NonNegative(), L1(0.3)]),
    Sum([L1(0.7), Box(-0.4, 0.9)]),
    Sum([L1(0.7), Box(0.2, 0.9)]),
    Sum([Box(-0.4, 0.6, on=WEIGHTS), ElasticNet(0.4, 0.8, on=["head.*", "scale"])]),
    Sum([SquaredL2(1.3, on="*.bias"), NonNegative(on="head.*"), L2(0.5, on="scale")]),
    Intersection([Box(-0.4, 0.6), Affine([[1.0] * D], [1.0])]),
    Intersection([L2Ball(1.5), Box(-0.3, 1.0, on=WEIGHTS)]),
    Intersection([NonNegative(), L1Ball(1.0)]),
]
PROXES = [g.bind(LAYOUT) for g in PROXES]
STEPS = [0.1, 0.7, 2.0]


def over(those):
    return pytest.mark.parametrize("g", those, ids=[f"{type(g).__name__}-{PROXES.index(g)}" for g in those])


every_g = over(PROXES)
every_set = over([g for g in PROXES if g.indicator])
every_other = over([g for g in PROXES if not g.indicator])
every_formula = over([g for g in PROXES if not isinstance(g, Intersection)])


def vectors(seed, count=100, spread=2.0):
    """Random vectors, some of whose entries are 0, tiny or equal in size; the first is 0."""
    rng = np.random.default_rng(seed)
    draws = rng.normal(size=(count, D)) * rng.choice([0.0, 0.1, 1.0, 1.0], size=(count, D))
    draws[: count // 4] = np.round(draws[: count // 4])
    draws[0] = 0
    return torch.as_tensor(spread * draws)


def finite(g, seed):
    """Random points where g is finite."""
    v = vectors(seed)
    return torch.cat([g.prox(v, 1.0), 0.5 * (g.prox(v, 1.0) + g.prox(-v, 0.3))])


def slack(g):
    """What rounding may spoil, or the iterations of an intersection leave open."""
    return 1e-8 if isinstance(g, Intersection) else 1e-11


def dot(a, b):
    return (a * b).sum(-1)


@every_g
def test_prox_is_firmly_non_expansive(g):
    u, v = vectors(1), vectors(2)
    margin = 1e-7 if isinstance(g, Intersection) else 1e-12
    for t in STEPS:
        p, q = g.prox(u, t), g.prox(v, t)
        assert (dot(p - q, p - q) <= dot(p - q, u - v) + margin).all()


@every_g
def test_prox_beats_every_other_point(g):
    v, far = vectors(3, 20), torch.cat([finite(g, 4), vectors(6)])
    for t in STEPS:
        p = g.prox(v, t)
        near = g.prox(p + 1e-3 * vectors(5, 50)[:, None], 1e-3)
        others = torch.cat([far[:, None].expand(-1, *v.shape), near, v[None]])
        objective = g(others) + dot(others - v, others - v) / (2 * t)
        assert (g(p) + dot(p - v, p - v) / (2 * t) <= objective.amin(0) + slack(g)).all()


@every_g
def test_residual_is_a_subgradient_at_the_prox(g):
    v, y = vectors(8, 20), finite(g, 7)[:, None]
    for t in STEPS:
        p = g.prox(v, t)
        assert (g(p) < float("inf")).all()
        assert (g(y) >= g(p) + dot(y - p, (v - p) / t) - 10 * slack(g)).all()


@every_formula  # an intersection has none; the search in test_prox_oracles covers it
def test_moreau_decomposes_every_vector(g):
    for t in STEPS:
        for v in vectors(9, 20):
            dual = conjugate_prox(g, v.numpy() / t, 1 / t)
            close(g.prox(v, t) + t * torch.as_tensor(dual), v, 1e-11)


@every_set
def test_projections_are_idempotent_and_ignore_the_step(g):
    v = vectors(10)
    p = g.prox(v, 0.4)
    close(g.prox(p, 0.4), p, slack(g))
    assert torch.equal(g.prox(v, 1.7), p)
    assert torch.equal(g.prox(v, 1e-12), p)
    assert (g(p) == 0).all()


@every_other
def test_a_vanishing_step_gives_the_vector_back(g):
    v = vectors(11)
    inside = g.prox(v, 1e-12)
    close(g.prox(inside, 1e-12), inside, 1e-9)
    if not isinstance(g, Sum):  # whose parts may be constraints
        close(inside, v, 1e-9)


@every_g
def test_precision_and_device_are_kept_and_the_input_is_not_modified(g):
    for dtype, accuracy in {torch.float64: 0, torch.float32: 2e-5, torch.bfloat16: 0.2}.items():
        v = vectors(12, 4).to(dtype)
        before = v.clone()
        p = g.prox(v, 0.5)
        assert (p.dtype, p.device, p.shape) == (v.dtype, v.device, v.shape)
        assert (g(v).dtype, g(v).shape) == (dtype, (4,))
        assert torch.equal(v, before)
        close(p, g.prox(v.double(), 0.5), accuracy)
        if dtype != torch.bfloat16:
            assert (g(p) < float("inf")).all()


@every_g
def test_leading_dimensions_are_separate_vectors(g):
    v = vectors(13, 8).reshape(2, 4, D)
    together, values, inside = g.prox(v, 0.6), g(v), g(g.prox(v, 0.6))
    assert values.shape == (2, 4)
    for i in range(2):
        for j in range(4):
            close(together[i, j], g.prox(v[i, j], 0.6), slack(g) / 10)
            close(values[i, j], g(v[i, j]), 1e-12)
            close(inside[i, j], g(together[i, j]), 1e-12)
            assert g(v[i, j]).ndim == 0


@every_g
def test_entries_that_are_not_selected_stay_bit_for_bit_and_do_not_count(g):
    chosen = [index for name in g.acts_on(LAYOUT) for index in where(name)]
    others = [index for index in range(D) if index not in chosen]
    v, noise = vectors(14), vectors(15)
    p = g.prox(v, 0.5)
    assert torch.equal(p[:, others], v[:, others])
    elsewhere = p.clone()
    elsewhere[:, others] = noise[:, others]
    assert torch.equal(g(elsewhere), g(p))


@every_g
def test_a_step_that_is_negative_or_infinite_is_refused(g):
    for t in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step t of a prox must be a finite number >= 0, got"):
            g.prox(vectors(16, 2), t)


@every_g
def test_a_step_of_zero_gives_the_nearest_point_where_g_is_finite(g):
    v = vectors(18)
    nearest = g.prox(v, 0.0)
    assert (g(nearest) < float("inf")).all()
    close(nearest, g.prox(v, 1e-13), 1e-9)
    if not g.constrained:
        assert torch.equal(nearest, v)


@every_g
def test_g_is_what_is_finite_of_it_plus_0_or_infinity(g):
    v = vectors(19)
    finite, value = g.finite(v), g(v)
    assert (finite.dtype, finite.shape) == (value.dtype, value.shape)
    assert finite.isfinite().all()
    inside = value < float("inf")
    assert torch.equal(finite[inside], value[inside])
    assert inside.all() or g.constrained
    distance = (v - g.prox(v, 0.0)).norm(dim=-1)
    assert ((distance < 1e-6) == inside).all()


@every_g
def test_bound_or_not_they_compare_hash_print_and_pickle_alike(g):
    copied = pickle.loads(pickle.dumps(g))
    fresh = type(g)(**{field.name: getattr(g, field.name) for field in fields(g)})
    v = vectors(17, 3)
    for other in (copied, fresh, g.bind(LAYOUT)):
        assert other == g
        assert hash(other) == hash(g)
        assert repr(other) == repr(g)
        assert hyper_parameters(other) == hyper_parameters(g)
    for other in (copied, fresh.bind(LAYOUT), g.bind(LAYOUT)):
        assert torch.equal(other.prox(v, 0.5), g.prox(v, 0.5))

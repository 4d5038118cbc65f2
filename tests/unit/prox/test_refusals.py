"""Regularisers and constraints: what is refused, and how they are made."""

import dataclasses
import re

import pytest
import torch
from helpers.problems import close
from helpers.prox_references import V

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
    Prox,
    Scaled,
    Simplex,
    SquaredL2,
    Sum,
    Translated,
    Zero,
)

INF = float("inf")


@pytest.mark.parametrize(
    "g",
    [
        GroupLasso(1e-3),
        Nuclear(1.0),
        L1(1.0, on="*.weight"),
        L2(1.0, scope="per_tensor"),
        Sum([L1(on="a"), L1(on="b")]),
        Sum([L1(), Box(on="a")]),
    ],
    ids=lambda g: f"{g!r:.40}",
)
def test_one_that_needs_the_modules_parameters_says_so(g):
    about = rf"^{type(g).__name__} needs the module's parameters.*bound by FederatedServer; in simulate use bind\("
    for use in (g, lambda v: g.prox(v, 1.0), Scaled(g, 2.0), lambda v: Translated(g, 1.0).prox(v, 1.0)):
        with pytest.raises(ValueError, match=about):
            use(V)


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_that_exist(layout):
    names = "They are: conv.weight, conv.bias, norm.weight, norm.bias, head.weight, head.bias."
    for g in (L1(on="haed.*"), L1(on=["head.*", "haed.*"]), Sum([L1(on="haed.*")]), Scaled(L1(on="haed.*"), 2.0)):
        with pytest.raises(ValueError, match=re.escape("L1.on='haed.*' matches none of the module's")) as refusal:
            g.bind(layout)
        assert names in str(refusal.value)
    with pytest.raises(ValueError, match="leaves none of"):
        L1(on=["head.*", "!*"]).bind(layout)


def test_the_nuclear_norm_of_a_bias_is_refused(layout):
    with pytest.raises(ValueError, match=r"conv\.bias has shape \(3,\).*on=\"\*\.weight\""):
        Nuclear(1.0).bind(layout)


def test_parts_of_a_sum_that_share_a_parameter_are_refused(layout):
    with pytest.raises(ValueError, match=r"L1\(.*and L2Ball\(.*both act on head.weight.*ElasticNet, or Intersection"):
        Sum([L1(on="*.weight"), L2Ball(on="head.*")]).bind(layout)
    for parts in ([L1(), SquaredL2()], [Box(), NonNegative()], [L1(), Box(), NonNegative()], [L2(), NonNegative()]):
        with pytest.raises(ValueError, match=r"both act on conv.weight.*for one of L1, SquaredL2, ElasticNet with"):
            Sum(parts).bind(layout)
        with pytest.raises(ValueError, match=r"both act on all parameters, and the prox of their sum is not composed"):
            Sum(parts).prox(V, 1.0)


def test_only_constraints_have_an_intersection():
    with pytest.raises(ValueError, match=r"Intersection takes constraints.*L1\(c=1.0, on=None\) is not a constraint"):
        Intersection([Box(), L1()])


@pytest.mark.parametrize("parts", [[], (), None, L1(), "L1", [L1(), 3], [L1]], ids=repr)
@pytest.mark.parametrize("kind", [Sum, Intersection])
def test_what_is_made_of_parts_refuses_anything_else(kind, parts):
    with pytest.raises(TypeError, match=f"^{kind.__name__} is made of one Prox or more"):
        kind(parts)


@pytest.mark.parametrize("make", [lambda g: Scaled(g, 2.0), lambda g: Translated(g, 2.0)])
def test_what_is_no_regulariser_is_refused(make):
    with pytest.raises(TypeError, match="is made of one Prox or more, such as L1"):
        make("L1")


NO_STRENGTHS = [-1.0, -1e-300, float("nan"), INF, "1", None, True, [1.0]]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, "c") for k in (L1, SquaredL2, L2, LInf, GroupLasso, Nuclear)] + [(ElasticNet, "c1"), (ElasticNet, "c2")],
)
def test_a_strength_that_is_no_finite_non_negative_number_is_refused(kind, name):
    for c in NO_STRENGTHS:
        with pytest.raises(
            ValueError, match=rf"^{kind.__name__}\.{name} must be a finite number >= 0, got "
        ) as refusal:
            kind(**{name: c})
        assert repr(c) in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (L2Ball, "L2Ball.radius"),
        (L1Ball, "L1Ball.radius"),
        (Simplex, "Simplex.total"),
        (lambda a: Scaled(L1(), a), "Scaled.a"),
        (lambda tolerance: Intersection([Box()], tolerance), "Intersection.tolerance"),
    ],
)
def test_a_size_that_is_not_positive_is_refused(make, name):
    for size in [0.0, *NO_STRENGTHS]:
        with pytest.raises(ValueError, match=rf"^{re.escape(name)} must be positive, got {re.escape(repr(size))}"):
            make(size)


@pytest.mark.parametrize(("lo", "hi"), [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("nan")), ("0", 1.0)])
def test_a_box_without_inside_is_refused(lo, hi):
    with pytest.raises(ValueError, match=f"Box needs lo <= hi, got lo={lo!r}, hi={hi!r}"):
        Box(lo, hi)


@pytest.mark.parametrize("on", ["", [], [""], 3, ["a", 3], True, {"a": 1}], ids=repr)
@pytest.mark.parametrize("kind", [L1, GroupLasso, L2Ball, Box, NonNegative])
def test_patterns_that_are_no_strings_are_refused(kind, on):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}\.on must be a pattern of names"):
        kind(on=on)


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match=r"L2Ball\.scope must be one of global, per_tensor; got 'tensor'"):
        L2Ball(scope="tensor")
    with pytest.raises(ValueError, match=r"GroupLasso\.by must be one of tensor, row, filter; got 'column'"):
        GroupLasso(by="column")
    with pytest.raises(ValueError, match=r"GroupLasso\.weight must be one of sqrt_size, one; got 2"):
        GroupLasso(weight=2)
    with pytest.raises(ValueError, match=r"Intersection\.max_iterations must be a whole number >= 1, got 0"):
        Intersection([Box()], max_iterations=0)


def test_equations_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"A of shape \(k, d\) and b of shape \(k,\), got \(2,\) and \(1,\)"):
        Affine([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="the equations contradict each other"):
        Affine([[1.0, 1.0], [2.0, 2.0]], [1.0, 3.0])
    with pytest.raises(ValueError, match="must be finite"):
        Affine([[1.0, INF]], [1.0])
    with pytest.raises(ValueError, match=r"Affine\.A has 2 columns, but there are 5 entries"):
        Affine([[1.0, 1.0]], [1.0]).prox(V, 1.0)
    with pytest.raises(ValueError, match=r"Translated\.shift has 2 entries, but x has 5"):
        Translated(L1(), [1.0, 2.0]).prox(V, 1.0)
    for shift in ([[1.0]], float("nan"), [INF]):
        with pytest.raises(ValueError, match=r"Translated\.shift must be a finite number or flat vector"):
            Translated(L1(), shift)


def test_decimal_numbers_keep_their_digits():
    close(Translated(NonNegative(), 0.2).prox(torch.zeros(1, dtype=torch.float64), 1.0), [0.2], 0)
    close(Translated(NonNegative(), [0.2]).prox(torch.zeros(1, dtype=torch.float64), 1.0), [0.2], 0)
    close(Affine([[1.0]], [0.2]).prox(torch.zeros(1, dtype=torch.float64), 1.0), [0.2], 1e-16)


def test_tensors_given_are_copied_and_compared_by_value():
    A, b, shift = torch.ones(1, 2), torch.ones(1), torch.ones(2)
    affine, moved = Affine(A, b), Translated(L1(), shift)
    assert affine == Affine(A, b) == Affine([[1.0, 1.0]], [1.0])
    assert moved == Translated(L1(), [1.0, 1.0])
    A[0, 0] = shift[0] = 9.0
    assert affine == Affine([[1.0, 1.0]], [1.0]) != Affine(A, b)
    assert moved == Translated(L1(), [1.0, 1.0]) != Translated(L1(), shift)
    assert affine != moved
    assert len({affine, moved, Affine([[1.0, 1.0]], [1.0])}) == 2


def test_regularisers_are_frozen_and_abstract_ones_cannot_be_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        L1(1.0).c = 2.0
    assert L1(1.0) == L1(1.0) != L1(2.0)
    assert L1(on=["a", "b"]) == L1(on=("a", "b")) != L1(on="a")
    with pytest.raises(TypeError, match="abstract"):
        Prox()


def test_attributes_are_arguments_from_which_the_command_line_rebuilds_a_default():
    for g in (Zero(), L1(0.1), L2(on="a"), Box(on=["a", "b"]), GroupLasso(), Nuclear(), L2Ball(), Sum([L1()])):
        assert type(g)(**vars(g)) == g


def test_one_of_your_own_needs_a_value_and_a_prox_only(layout):
    class Mine(Prox):
        def __call__(self, x):
            return 0.5 * x.square().sum(-1)

        def prox(self, v, t):
            return v / (1 + t)

    mine = Mine()
    assert mine.bind(layout) is mine
    assert not mine.indicator
    close(Scaled(mine, 1.0).prox(V, 1.0), SquaredL2(1.0).prox(V, 1.0), 0)

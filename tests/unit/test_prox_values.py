"""Regularisers and constraints: the numbers of the specification, parameters chosen by name, and what is refused."""

import dataclasses
import math
import re

import pytest
import torch
from problems import close
from torch import nn

from lightning_fed import Quadratic, simulate
from lightning_fed.algorithms import FedADMM
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
from lightning_fed.vector import Layout

V = torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0], dtype=torch.float64)
MATRIX = torch.tensor([3.0, 0.0, 4.0, 5.0], dtype=torch.float64)
INF = float("inf")


class Net(nn.Module):
    """Convolution, normalisation, linear layer: every shape a pattern may meet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)


@pytest.fixture
def net():
    return Net().double()


@pytest.fixture
def layout(net):
    return Layout.of(net)


@pytest.fixture
def x(layout):
    return torch.randn(layout.numel, dtype=torch.float64)


def matrices(*shape):
    return Layout(("weight",), (shape,), torch.float64)


# --- numbers ---------------------------------------------------------------------------------------------------------


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
    with pytest.warns(UserWarning, match="not at the nearest point after 20 sweeps.*no common point"):
        apart.prox(V, 1.0)


# --- parameters by name ----------------------------------------------------------------------------------------------


def by_tensor(layout, x, names, change):
    """x with ``change`` applied to the named parameters, one at a time."""
    parts = layout.split(x.clone())
    return torch.cat([(change(p) if name in names else p).reshape(-1) for name, p in parts.items()])


WEIGHTS = ["conv.weight", "norm.weight", "head.weight"]


@pytest.mark.parametrize(
    ("g", "names", "change"),
    [
        (L1(0.3, on="*.weight"), WEIGHTS, lambda p: p.sign() * torch.relu(p.abs() - 0.15)),
        (L1(0.3, on=["head.*"]), ["head.weight", "head.bias"], lambda p: p.sign() * torch.relu(p.abs() - 0.15)),
        (SquaredL2(2.0, on="norm.*"), ["norm.weight", "norm.bias"], lambda p: p / 2),
        (Box(-0.1, 0.2, on="*.bias"), ["conv.bias", "norm.bias", "head.bias"], lambda p: p.clamp(-0.1, 0.2)),
        (L2(1.0, on="*.weight", scope="per_tensor"), WEIGHTS, lambda p: p * torch.relu(1 - 0.5 / p.norm())),
        (
            L2Ball(1.0, on="head.*", scope="per_tensor"),
            ["head.weight", "head.bias"],
            lambda p: p / p.norm().clamp(min=1),
        ),
        (GroupLasso(0.5, on="*.weight"), WEIGHTS, lambda p: p * torch.relu(1 - 0.25 * p.numel() ** 0.5 / p.norm())),
        (
            GroupLasso(0.5, on="conv.weight", by="filter"),
            ["conv.weight"],
            lambda p: torch.stack([f * torch.relu(1 - 0.25 * math.sqrt(8) / f.norm()) for f in p]),
        ),
        (
            GroupLasso(0.5, on="head.weight", by="row", weight="one"),
            ["head.weight"],
            lambda p: torch.stack([row * torch.relu(1 - 0.25 / row.norm()) for row in p]),
        ),
        (GroupLasso(0.5, on="*.bias", by="row"), [], None),
        (
            Sum([L1(0.3, on="*.weight"), L1(0.3, on="*.bias")]),
            [*WEIGHTS, "conv.bias", "norm.bias", "head.bias"],
            lambda p: p.sign() * torch.relu(p.abs() - 0.15),
        ),
    ],
    ids=lambda value: f"{value!r:.60}" if isinstance(value, Prox) else "",
)
def test_only_the_named_parameters_move(g, names, change, layout, x):
    if change is None:  # one entry of a bias is one output unit
        names, change = ["conv.bias", "norm.bias", "head.bias"], lambda p: p.sign() * torch.relu(p.abs() - 0.25)
    close(g.bind(layout).prox(x, 0.5), by_tensor(layout, x, names, change), 1e-14)


def test_scope_decides_whether_tensors_share_a_norm(layout, x):
    parts = layout.split(x)
    head = torch.cat([parts["head.weight"].reshape(-1), parts["head.bias"]])
    norms = parts["head.weight"].norm() + parts["head.bias"].norm()
    assert float(L2(1.0, on="head.*").bind(layout)(x)) == pytest.approx(float(head.norm()))
    assert float(L2(1.0, on="head.*", scope="per_tensor").bind(layout)(x)) == pytest.approx(float(norms))
    together = layout.split(L2Ball(0.1, on="head.*").bind(layout).prox(x, 1.0))
    close(together["head.weight"].square().sum() + together["head.bias"].square().sum(), 0.01, 1e-12)
    apart = layout.split(Simplex(2.0, on="head.*", scope="per_tensor").bind(layout).prox(x, 1.0))
    close([apart["head.weight"].sum(), apart["head.bias"].sum()], [2.0, 2.0], 1e-12)
    linf = LInf(1.0, scope="per_tensor").bind(layout)
    assert float(linf(x)) == pytest.approx(sum(float(p.abs().max()) for p in parts.values()))


def test_parameters_that_are_apart_in_the_vector_are_one_vector_to_a_global_g(layout, x):
    g = L1Ball(1.0, on=["conv.bias", "head.bias"]).bind(layout)
    before, after = layout.split(x), layout.split(g.prox(x, 1.0))
    joined = torch.cat([before["conv.bias"], before["head.bias"]])
    close(torch.cat([after["conv.bias"], after["head.bias"]]), L1Ball(1.0).prox(joined, 1.0), 1e-14)
    assert torch.equal(after["norm.bias"], before["norm.bias"])


def test_nuclear_takes_a_convolution_as_out_times_the_rest(layout, x):
    g = Nuclear(0.5, on=["conv.weight", "head.weight"]).bind(layout)
    before, after = layout.split(x), layout.split(g.prox(x, 1.0))
    for name, flat in {"conv.weight": (3, 8), "head.weight": (4, 3)}.items():
        was, now = (torch.linalg.svdvals(p[name].reshape(flat)) for p in (before, after))
        close(now, torch.relu(was - 0.5), 1e-12)
    values = [torch.linalg.svdvals(before[n].flatten(1)).sum() for n in ("conv.weight", "head.weight")]
    assert float(g(x)) == pytest.approx(0.5 * float(sum(values)))


def test_group_lasso_counts_each_group_by_the_root_of_its_size(layout, x):
    parts = layout.split(x)
    filters = sum(float(f.norm()) for f in parts["conv.weight"])
    assert float(GroupLasso(2.0, on="conv.weight", by="filter").bind(layout)(x)) == pytest.approx(
        2 * math.sqrt(8) * filters
    )
    tensors = sum(math.sqrt(p.numel()) * float(p.norm()) for p in parts.values())
    assert float(GroupLasso(2.0).bind(layout)(x)) == pytest.approx(2 * tensors)


def test_names_after_an_exclamation_mark_are_left_out(layout):
    assert L1(on=["*.weight", "!norm.*"]).acts_on(layout) == ("conv.weight", "head.weight")
    assert L1(on=["!*.bias", "!norm.*"]).acts_on(layout) == ("conv.weight", "head.weight")
    assert L1(on="!*.bias").acts_on(layout) == ("conv.weight", "norm.weight", "head.weight")
    assert L1().acts_on(layout) == layout.names


def test_parts_without_names_need_no_module_and_are_bound_to_themselves(layout):
    for g in (Zero(), L1(), Box(), L2(), L2Ball(), Simplex()):
        assert g.bind(layout) is g


def test_binding_again_follows_the_new_layout(layout, net, x):
    bound = L2Ball(1.0, on="head.*").bind(layout)
    for name, p in net.named_parameters():
        p.requires_grad_(name.startswith("head"))
    smaller = Layout.of(net)
    close(bound.bind(smaller).prox(x[: smaller.numel], 1.0), L2Ball(1.0).prox(x[: smaller.numel], 1.0), 1e-14)
    with pytest.raises(ValueError, match=rf"L2Ball is bound to parameters with {layout.numel} entries, but x has 16"):
        bound.prox(x[: smaller.numel], 1.0)


def test_nested_parts_are_bound_and_a_constraint_holds_only_where_it_is_named(layout, x):
    sets = [L2Ball(1.0, on="*.weight"), Scaled(Translated(Box(-0.1, 0.1, on=["conv.*", "head.*"]), 0.2), 2.0)]
    g = Intersection(sets).bind(layout)
    p = layout.split(g.prox(x, 1.0))
    assert torch.equal(p["norm.bias"], layout.split(x)["norm.bias"])
    assert all((p[n] > 0.1 - 1e-9).all() and (p[n] < 0.3 + 1e-9).all() for n in p if not n.startswith("norm"))
    assert g.acts_on(layout) == tuple(n for n in layout.names if n != "norm.bias")


def test_an_algorithm_runs_with_a_bound_regulariser():
    """One client, |x - b|^2 / 2 + g(x): the minimiser is the prox itself."""
    g = GroupLasso(1.0, by="row", weight="one").bind(matrices(2, 2))
    x_bar = simulate(FedADMM(eta=1.0, g=g), [Quadratic(torch.eye(4).double(), MATRIX)], rounds=100).x_bar
    close(x_bar, g.prox(MATRIX, 1.0), 1e-10)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "g",
    [
        GroupLasso(1e-3),
        Nuclear(1.0),
        L1(1.0, on="*.weight"),
        L2(1.0, scope="per_tensor"),
        Sum([L1(on="a"), L1(on="b")]),
        Sum([L1(), SquaredL2()]),
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
    with pytest.raises(ValueError, match=r"L1\(.*and Box\(.*both act on head.weight.*ElasticNet, or Intersection"):
        Sum([L1(on="*.weight"), Box(on="head.*")]).bind(layout)
    with pytest.raises(ValueError, match=r"both act on conv.weight"):
        Sum([L1(), SquaredL2()]).bind(layout)


def test_only_constraints_have_an_intersection():
    with pytest.raises(ValueError, match=r"Intersection is of constraints.*L1\(c=1.0, on=None\) is none"):
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

"""Regularisers and constraints on parameters chosen by name."""

import math

import pytest
import torch
from helpers.problems import close
from helpers.prox_references import MATRIX, matrices

from lightning_fed import Quadratic, simulate
from lightning_fed.algorithms import FedADMM
from lightning_fed.core.layout import Layout
from lightning_fed.prox import (
    L1,
    L2,
    Box,
    GroupLasso,
    Intersection,
    L1Ball,
    L2Ball,
    LInf,
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

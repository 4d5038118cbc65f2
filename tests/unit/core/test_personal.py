"""Which names are personal, and what is refused before a fit begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.core.layout import Layout
from lightning_fed.core.personal import Personal


def model() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2), "head": nn.Linear(2, 1)})


def test_patterns_choose_parameters_and_buffers_and_leave_the_rest_to_the_layout() -> None:
    personal = Personal.of(["head.*", "norm.*", "!head.bias"])
    assert list(personal.part_of(model())) == [
        "norm.weight",
        "norm.bias",
        "head.weight",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert Layout.of(model(), personal).names == ("body.weight", "body.bias", "head.bias")
    assert Layout.of(model()).numel == 13
    assert not Personal.of(None)
    assert "head.weight" not in Personal.of(None)
    assert Personal.of("head.*").rest({"head.a": torch.ones(1), "b": torch.ones(1)}).keys() == {"b"}


@pytest.mark.parametrize("given", ["", [], ["head.*", ""], [3], 3, {"head": 1}])
def test_what_is_no_pattern_is_refused_by_the_constructor(given: Any) -> None:
    with pytest.raises(ValueError, match=r'FederatedServer.personal must be a pattern of names such as "head\.\*"'):
        FederatedServer(FedAvg(), personal=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hed.*", r"'hed\.\*' matches no parameter or buffer.*nearest names are head\.bias.*'head\.\*'"),
        ("head", r"'head' matches no parameter.*head\.weight"),
        (["head.*", "!nose"], "'!nose' matches no parameter"),
        (["head.*", "!*"], "leaves no parameter or buffer personal"),
        ("*", "matches every trainable parameter of ModuleDict"),
        (["body.*", "norm.*", "head.*"], "nothing to federate"),
    ],
)
def test_patterns_that_do_not_fit_the_module_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Personal.of(given).check(model())


def test_a_shared_tensor_is_personal_by_all_its_names_or_none() -> None:
    tied: Any = model()
    tied["copy"] = nn.Linear(2, 1)
    tied["copy"].weight = tied["head"].weight
    with pytest.raises(ValueError, match=r"matches head\.weight, but not copy\.weight, which is the same tensor"):
        Personal.of("head.*").check(tied)
    Personal.of(["head.*", "copy.*"]).check(tied)
    assert "head.weight" not in Layout.of(tied, Personal.of(["head.*", "copy.*"])).names


def test_a_frozen_body_leaves_nothing_to_federate() -> None:
    module: Any = model()
    module["body"].requires_grad_(False)
    module["norm"].requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to federate"):
        Personal.of("head.*").check(module)
    with pytest.raises(ValueError, match="no trainable parameters besides its personal ones"):
        Layout.of(module, Personal.of("head.*"))

"""Objects are made what they were, in place, however deep a change was made."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torchmetrics import MeanMetric

from lightning_fed.trainer.memento import Memento, NotCopyableError
from lightning_fed.trainer.module_state import Attributes, ModuleState
from lightning_fed.trainer.notes import same, same_numbers


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self) -> None:
        self.shown = 1
        self.__hidden = [1]

    def change(self) -> None:
        self.shown = 2
        self.__hidden.append(2)

    def content(self) -> Any:
        return self.shown, list(self.__hidden)


@dataclass
class Tree:
    value: int = 0
    children: list[Tree] = field(default_factory=list)


def closure() -> Any:
    count, seen = 0, []

    def increment() -> Any:
        nonlocal count
        count += 1
        seen.append(count)
        return count, list(seen)

    return increment


def changed_at(path: str, value: Any) -> Any:
    return lambda root: exec(f"root{path} = value", {"root": root, "value": value})


CASES: dict[str, tuple[Any, Any, Any]] = {  # an object, a change, and what to look at
    "list": (lambda: [1, [2, 3]], lambda o: o[1].append(4), repr),
    "dict": (lambda: {"a": {"b": [1]}}, lambda o: o["a"]["b"].clear(), repr),
    "dict, new key": (lambda: {"a": 1}, lambda o: o.update(b=2), repr),
    "dict, order": (lambda: {"a": 1, "b": 2}, lambda o: o.update(a=o.pop("a")), repr),
    "ordered": (lambda: OrderedDict(a=1), lambda o: o.update(b=2), repr),
    "defaultdict": (lambda: defaultdict(list), lambda o: o["new"].append(1), repr),
    "counter": (lambda: Counter("aab"), lambda o: o.update("b"), repr),
    "set": (lambda: {1, 2}, lambda o: o.discard(1), repr),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda o: o.append(3), repr),
    "list in a tuple": (lambda: (1, [2]), lambda o: o[1].append(3), repr),
    "namespace": (lambda: SimpleNamespace(a=SimpleNamespace(b=1)), changed_at(".a.b", 2), repr),
    "slots": (Slotted, Slotted.change, Slotted.content),
    "dataclass, deep": (lambda: Tree(0, [Tree(1, [Tree(2)])]), changed_at(".children[0].children[0].value", 9), repr),
    "closure": (closure, lambda o: o(), lambda o: [c.cell_contents for c in o.__closure__]),
    "bound method": (lambda: SimpleNamespace(a=[1]).a.append, lambda o: o(2), lambda o: list(o.__self__)),
    "partial": (lambda: partial(print, [1]), lambda o: o.args[0].append(2), repr),
    "tensor": (lambda: torch.zeros(2), lambda o: o.add_(1), repr),
    "tensor by data": (lambda: torch.zeros(2), lambda o: o.data.add_(1), repr),
    "tensor, resized": (lambda: torch.zeros(2), lambda o: o.resize_(3), repr),
    "tensor with a gradient": (lambda: torch.zeros(2, requires_grad=True), lambda o: o.data.add_(1), repr),
    "array": (lambda: np.zeros(3), lambda o: np.add(o, 1, out=o), repr),
    "array of objects": (lambda: np.array([[1], None], dtype=object), lambda o: o[0].append(2), repr),
    "bytes": (lambda: bytearray(b"ab"), lambda o: o.append(1), repr),
    "random": (lambda: random.Random(0), lambda o: o.random(), lambda o: o.getstate()),
    "numpy": (lambda: np.random.default_rng(0), lambda o: o.random(), lambda o: o.bit_generator.state),
    "torch": (lambda: torch.Generator(), lambda o: torch.rand(2, generator=o), lambda o: o.get_state().tolist()),
    "legacy": (lambda: np.random.RandomState(0), lambda o: o.rand(), lambda o: repr(o.get_state())),
    "a hidden network": (lambda: [nn.Linear(1, 1)], lambda o: o[0].weight.data.zero_(), lambda o: o[0].weight.tolist()),
    "config": (lambda: OmegaConf.create({"a": {"b": 1}}), changed_at(".a.b", 2), repr),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen_and_undone_in_the_same_object(name: str) -> None:
    make, change, look = CASES[name]
    value = make()
    memento = Memento()
    notes = memento.add(value)
    before = look(value)
    assert not any(note.changed() for note in notes)
    change(value)
    assert look(value) != before
    assert any(note.changed() for note in notes)
    memento.restore()
    assert look(value) == before
    assert not any(note.changed() for note in notes)


def test_a_new_class_may_have_its_attributes_removed_and_added() -> None:
    value = SimpleNamespace(a=1)
    memento = Memento()
    memento.add(value)
    del value.a
    value.b = 2
    memento.restore()
    assert vars(value) == {"a": 1}


def test_objects_that_are_shared_stay_shared() -> None:
    inner: list[int] = [1]
    value = {"a": inner, "b": inner}
    memento = Memento()
    memento.add(value)
    value["a"] = [9]
    value["b"].append(2)
    memento.restore()
    assert value["a"] is value["b"] is inner
    assert inner == [1]


def test_cycles_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    memento = Memento()
    memento.add(value)
    value[0] = 2
    memento.restore()
    assert value[0] == 1


def running() -> Any:
    yield 1


@pytest.mark.parametrize("make", [threading.Lock, running, lambda: iter([1]), partial(open, __file__)])
def test_what_cannot_be_copied_is_refused_and_nothing_of_it_is_noted(make: Any) -> None:
    inside, memento = make(), Memento()
    with pytest.raises(NotCopyableError):
        memento.add([[1], {"a": inside}])
    assert not memento.notes
    if hasattr(inside, "close"):
        inside.close()


def test_equal_values_are_the_same_and_equal_lists_are_not() -> None:
    assert same(1.5, 1.5)
    assert same(("a", (2,)), ("a", (2,)))
    assert not same([1], [1])
    assert not same(True, 1)
    assert same_numbers(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_numbers(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert same_numbers(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.settings = {"deep": [1]}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.layer, self.metric = Part(), nn.BatchNorm1d(2), MeanMetric()
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.outputs: list[Any] = ["before"]
        self.lock = threading.Lock()

    @cached_property
    def twice(self) -> int:
        return 2


def test_attributes_of_parts_are_named_by_their_path() -> None:
    module = Whole()
    attributes = Attributes(module)
    module.part.count += 1
    module.part.settings["deep"].append(2)
    module.layer.momentum = 0.5
    module.added = 1
    assert module.twice == 2
    module.layer.eval()
    changes = attributes.changes()
    assert changes.names == ["added", "part.count", "layer.momentum"]
    assert list(attributes.not_copied) == ["lock"]
    attributes.restore()
    assert (module.part.count, module.part.settings, module.layer.momentum) == (0, {"deep": [1]}, 0.1)
    assert module.layer.training
    assert not hasattr(module, "added")


def test_appended_entries_can_be_joined_later() -> None:
    module = Whole()
    attributes = Attributes(module)
    found = []
    for i in range(2):
        module.outputs.append(i)
        module.part.settings["deep"].append(i)
        found.append(attributes.changes())
        attributes.restore()
        assert module.outputs == ["before"]
    for changes in found:
        assert not changes.names
        attributes.append(changes.appended)
    assert module.outputs == ["before", 0, 1]
    assert module.part.settings == {"deep": [1, 0, 1]}


def test_a_list_whose_beginning_changed_is_dropped_and_named() -> None:
    module = Whole()
    attributes = Attributes(module)
    module.outputs[0] = "other"
    module.outputs.append(1)
    changes = attributes.changes()
    assert (changes.names, dict(changes.appended)) == (["outputs"], {})


def test_metrics_go_on_accumulating_unless_they_are_asked_for() -> None:
    module = Whole()
    without, with_them = Attributes(module), Attributes(module, metrics=True)
    module.metric.update(3.0)
    without.restore()
    assert float(module.metric.compute()) == 3
    with_them.restore()
    assert not module.metric.update_called


def test_frozen_parameters_that_moved_are_told_apart_by_value() -> None:
    module = Whole()
    state = ModuleState(module)
    assert set(state.moved()) == {"layer.running_mean", "layer.running_var", "layer.num_batches_tracked"}
    module.frozen.data.add_(1)  # no version counter sees it
    module.layer.weight.data.add_(1)
    moved = state.moved()
    assert moved["frozen"].tolist() == [1, 1]
    assert "layer.weight" not in moved
    state.restore({"frozen": torch.full((2,), 5.0)})
    assert module.frozen.tolist() == [5, 5]
    assert module.layer.weight.tolist() == [1, 1]


def test_random_generators_are_named_as_such() -> None:
    module = Whole()
    module.stream = np.random.default_rng(0)
    attributes = Attributes(module)
    module.stream.random()
    assert attributes.changes().streams == {"stream"}

"""Records, the one question, and what an algorithm has by default."""

import dataclasses

import pytest
import torch
from helpers.problems import WORK
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.core import (
    Algorithm,
    Broadcast,
    Question,
    Reply,
    Solution,
    Total,
    hyper_parameters,
    num_bytes,
    record,
    start_point,
    tree_map,
    wide,
)
from lightning_fed.core.validation import one_of, positive, shown
from lightning_fed.prox import L1, Box, Zero


@record
class Pair:
    a: Tensor
    b: Tensor


def pair(a, b):
    return Pair(torch.tensor(a), torch.tensor(b))


def test_a_record_is_frozen_and_equal_to_itself_only():
    p = pair([1.0], [2.0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.a = torch.zeros(1)
    assert p == p
    assert p != pair([1.0], [2.0])


def test_torch_sees_a_record_as_a_tree_of_its_fields_in_order():
    p = pair([1.0], [2.0])
    leaves, spec = pytree.tree_flatten(p)
    assert [float(leaf) for leaf in leaves] == [1.0, 2.0]
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, Pair)
    assert again.b is p.b


def test_records_are_scaled_and_added_tensor_by_tensor():
    p, q = pair([1.0, 2.0], [3.0]), pair([10.0, 20.0], [30.0])
    twice, total = tree_map(lambda leaf: 2 * leaf, p), tree_map(torch.add, p, q)
    assert (twice.a.tolist(), twice.b.tolist()) == ([2.0, 4.0], [6.0])
    assert (total.a.tolist(), total.b.tolist()) == ([11.0, 22.0], [33.0])
    assert p.a.tolist() == [1.0, 2.0]


def test_sums_are_kept_in_double_precision():
    assert wide(torch.ones(2, dtype=torch.float32)).dtype == torch.float64
    assert wide(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float64
    x = torch.ones(2, dtype=torch.float64)
    assert torch.equal(wide(x), x)


def test_bytes_on_the_wire_are_scalars_times_their_size():
    assert num_bytes(Broadcast(torch.zeros(7, dtype=torch.float32))) == 28
    assert num_bytes(Broadcast(torch.zeros(7, dtype=torch.float64))) == 56
    assert num_bytes(Pair(torch.zeros(2, dtype=torch.float16), torch.zeros(3, dtype=torch.int8))) == 7
    assert num_bytes(FedAvg().init_client(torch.zeros(7))) == 0
    assert num_bytes((torch.zeros(2, dtype=torch.float32), 3, "text")) == 8


def test_start_rules_pick_their_point():
    own, server, centre = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    picked = [
        start_point(rule, own=own, server=server, centre=lambda: centre) for rule in ("local", "server", "centre")
    ]
    assert [float(x) for x in picked] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("center", [None, torch.tensor([2.0, -1.0])])
@pytest.mark.parametrize("linear", [None, torch.tensor([0.5, 4.0])])
def test_a_question_draws_to_where_its_gradient_vanishes(linear, center):
    pull = Question(linear, 4.0, center).pull
    if linear is None and center is None:
        assert pull is None
    else:
        assert torch.equal(Question(linear, 4.0, center).gradient(pull, torch.zeros(2)), torch.zeros(2))
    assert Question(linear, 0.0, center).pull is linear


def test_the_centre_is_made_only_for_those_who_start_there():
    def centre():
        raise AssertionError

    x = torch.ones(1)
    for rule in ("local", "server"):
        start_point(rule, own=x, server=x, centre=centre)


def test_solutions_and_replies_know_nothing_they_were_not_told():
    x = torch.zeros(1)
    for thing in (Solution(x), Reply(None, None, x)):
        assert thing.loss != thing.loss  # nan
        assert thing.steps == 0


def test_total_keeps_the_weight_of_those_who_answered_apart_from_that_of_all():
    total = Total(sum=Broadcast(torch.ones(1)), weight=3.0, count=2, population=10.0, down=Broadcast(torch.ones(1)))
    assert (total.weight, total.count, total.population) == (3.0, 2, 10.0)


class Minimal(Algorithm):
    def init_server(self, x0):
        return Broadcast(x0)

    def init_client(self, x0):
        return None

    def client_step(self, client, down, local):
        raise AssertionError("nobody is asked")

    def server_step(self, server, total):
        return server


def test_an_algorithm_without_opinions_has_plain_defaults():
    x = torch.ones(2)
    assert Minimal().broadcast(Minimal().init_server(x), WORK).x_bar is x
    assert Minimal().weight(17) == 1.0
    assert Minimal().local_model(None) is None
    assert Minimal().traits.penalty == 0.0
    assert not Minimal().traits.full_start
    assert Minimal().g == Zero()


def test_an_algorithm_must_define_its_four_steps():
    for name in ("init_server", "init_client", "client_step", "server_step"):
        assert name in Algorithm.__abstractmethods__
    with pytest.raises(TypeError, match="abstract"):
        Algorithm()


@dataclasses.dataclass
class Knob:
    turn: object = 1.0
    mode: object = "a"


def test_choices_are_refused_with_the_list_of_those_allowed():
    one_of(Knob(mode="b"), "mode", ("a", "b"))
    with pytest.raises(ValueError, match=r"^Knob\.mode must be one of a, b; got 'c'\.$"):
        one_of(Knob(mode="c"), "mode", ("a", "b"))


@pytest.mark.parametrize("value", [1, 1e-300, 1e300, 2.5])
def test_positive_numbers_pass(value):
    positive(Knob(turn=value), "turn", "")
    positive(Knob(turn=0), "turn", "", zero=True)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, False, "1", None, 1j, [1]], ids=repr)
def test_others_are_refused_with_the_hint(value):
    with pytest.raises(ValueError, match=r"^Knob\.turn must be positive, got ") as refusal:
        positive(Knob(turn=value), "turn", "Turn it right.")
    assert str(refusal.value).endswith(f"got {shown(value)}. Turn it right.")


@pytest.mark.parametrize(("zero", "wanted"), [(False, "positive"), (True, "non-negative")])
def test_limits_are_named(zero, wanted):
    positive(Knob(turn=2), "turn", "", zero=zero, upper=2)
    with pytest.raises(ValueError, match=rf"must be {wanted} and at most 2, got 2\.5\. Less\."):
        positive(Knob(turn=2.5), "turn", "Less.", zero=zero, upper=2)


def test_hyper_parameters_are_plain_values_nested_by_name():
    assert hyper_parameters(FedADMM(eta=2.0, g=Box(-1.0, 1.0)))["g"] == {
        "name": "Box",
        "lo": -1.0,
        "hi": 1.0,
        "on": None,
    }
    assert hyper_parameters(L1(0.5)) == {"name": "L1", "c": 0.5, "on": None}
    assert hyper_parameters(Knob(turn=torch.tensor([1.0, 2.0]))) == {"name": "Knob", "turn": [1.0, 2.0], "mode": "a"}
    assert hyper_parameters(Minimal()) == {"name": "Minimal"}

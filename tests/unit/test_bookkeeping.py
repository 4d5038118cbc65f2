"""What a round, an evaluation and a log entry cost besides computing: as few objects and calls as there are needs."""

import random

import numpy as np
import pytest
import torch
from helpers.problems import WORK
from pytorch_lightning.loggers import WandbLogger
from torch import nn

from lightning_fed.algorithms import FedADMM
from lightning_fed.core import Solution, randomness
from lightning_fed.core.federation import Federation
from lightning_fed.core.memory import Cost
from lightning_fed.evaluation.by_sample import STACK, _groups
from lightning_fed.tracking import log_table


class _Local:
    def solve(self, start, **_):
        return Solution(start + 1, loss=0.5, steps=3)


class _Engine:
    def ask(self, step, states, down, cohort):
        for _, state in zip(cohort, states, strict=True):
            yield step(state, down, _Local())


def test_clients_who_never_took_part_share_one_fresh_state_a_round(monkeypatch):
    made = []
    init_client = FedADMM.init_client
    monkeypatch.setattr(FedADMM, "init_client", lambda self, x0: made.append(1) or init_client(self, x0))
    federation = Federation(FedADMM(), dict.fromkeys(range(1000), 1), nn.Linear(2, 1))
    outcome = federation.play(range(100), _Engine(), WORK)
    federation.commit(outcome)
    assert len(made) == 1
    assert len(federation.store) == 100
    assert federation.store.get(5).visits == 1
    assert federation.store.get(500) is None
    federation.commit(federation.play(range(50, 150), _Engine(), WORK))
    assert [federation.store.get(cid).visits for cid in (5, 60, 120)] == [1, 2, 1]
    assert federation.cost == Cost.sum(federation.store[cid].cost for cid in federation.store)
    assert federation.store[60].cost == federation.store[5].cost + federation.store[5].cost


def test_nothing_costs_nothing():
    assert Cost.sum([]) == Cost()
    assert Cost.sum([Cost(1, 2, 3, 4), Cost(10, 20, 30, 40)]) == Cost(11, 22, 33, 44)


@pytest.mark.parametrize("accelerated", [False, True])
def test_global_seeds_are_those_of_torch(monkeypatch, accelerated):
    monkeypatch.setattr(randomness, "_has_accelerator", lambda: accelerated)
    seed = randomness.derive_seed(3, "x")
    torch.manual_seed(seed)
    expected = torch.rand(3), np.random.RandomState(seed % 2**32).rand(), random.Random(seed).random()
    torch.rand(1)
    randomness.seed_global(3, "x")
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(), random.random()) == expected[1:]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to seed")
def test_seeding_leaves_no_notes_for_devices_that_are_not_there():
    before = len(torch.cuda._queued_calls)
    randomness.seed_global(1)
    assert len(torch.cuda._queued_calls) == before


class _Wandb(WandbLogger):
    disabled = True  # so that it has no folder for a CSV file

    def __init__(self):
        self.calls = []

    @property
    def experiment(self):
        return self

    def log(self, values):
        self.calls.append(values)


def test_a_table_and_its_histograms_are_one_message_to_wandb():
    logger = _Wandb()
    log_table(
        [logger], "clients/table", ["client", "loss"], [["a", 0.5], ["b", float("nan")]], 7, {"clients/loss": [0.5]}
    )
    (values,) = logger.calls
    assert list(values) == ["clients/table", "clients/loss", "trainer/global_step"]
    assert values["clients/table"].data == [["a", 0.5], ["b", None]]
    assert sum(values["clients/loss"].histogram) == 1
    assert values["trainer/global_step"] == 7


def test_clients_evaluated_together_fill_a_batch_but_do_not_overflow_it():
    sizes = dict(enumerate([30, 60, 20, 200, 5, 5]))
    assert list(_groups(list(sizes), sizes, 100, alike=False)) == [[0, 1], [2], [3], [4, 5]]
    assert list(_groups([4, 5, 2, 0, 1, 3], sizes, 100, alike=True)) == [
        [
            4,
            5,
            2,
        ],
        [0],
        [1],
        [3],
    ]
    many = dict.fromkeys(range(STACK + 1), 1)
    assert [len(group) for group in _groups(list(many), many, 10**6, alike=False)] == [STACK, 1]
    assert list(_groups([], {}, 100, alike=False)) == []

"""LEAF's text is learnt by its own model."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.leaf_files import role, write_people
from helpers.modules import quiet_trainer

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.datamodules import Leaf
from lightning_fed.models import ShakespeareLSTM


def test_the_lstm_learns_which_character_follows_in_a_text_that_repeats(tmp_path: Path) -> None:
    """Of "abc" each is followed by the next, which neither guessing (1/80) nor the commonest character (1/3) meets."""
    text = "abc" * 60
    write_people(tmp_path, {"ann": role(text), "bob": role(text[1:])}, {"ann": role(text), "bob": role(text[2:])})
    torch.manual_seed(0)
    model = ShakespeareLSTM(lr=4.0, hidden=16, log_train=False)
    server = FederatedServer(FedAvg(), local_steps=30)
    trainer = quiet_trainer(server, rounds=6)
    trainer.fit(model, datamodule=Leaf("shakespeare", tmp_path, batch_size=20))
    assert server.history[0]["federated/test_accuracy"] < 0.7
    assert server.history[-1]["federated/test_accuracy"] > 0.95

"""Checkpoints hold the server's model of the round they were taken in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer, x_of
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FederatedCallback


def server(**kwargs: Any) -> FederatedServer:
    algorithm = kwargs.pop("algorithm", FedADMM(eta=1.0))
    return FederatedServer(algorithm, **{"clients_per_round": 2, "local_steps": 3, **kwargs})


class ServerModels(FederatedCallback):
    """The server's state dict after each round."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.after.append({name: value.clone() for name, value in module.state_dict().items()})


@pytest.mark.parametrize(
    "options",
    [
        {"save_top_k": -1},
        {"save_top_k": -1, "every_n_train_steps": 1},
        {"save_top_k": -1, "save_on_train_epoch_end": False},
        {"save_top_k": -1, "monitor": "val_loss"},
        {"save_top_k": -1, "save_weights_only": True},
    ],
    ids=str,
)
def test_every_mode_of_model_checkpoint_holds_the_servers_weights(options: dict[str, Any], tmp_path: Path) -> None:
    models, save = ServerModels(), ModelCheckpoint(tmp_path, "{step}", **options)
    quiet_trainer(server(), 3, callbacks=[models, save], enable_checkpointing=True).fit(
        Net(), datamodule=classification(val=0.2)
    )
    for k in range(3):
        saved = torch.load(tmp_path / f"step={k + 1}.ckpt", weights_only=True)
        assert saved["global_step"] == k + 1
        assert all(torch.equal(value, models.after[k][name]) for name, value in saved["state_dict"].items())


def test_the_best_checkpoint_is_that_of_the_best_round(tmp_path: Path) -> None:
    values: list[float] = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if not trainer.sanity_checking:
                values.append(float(trainer.callback_metrics["val_loss"]))

    save = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss")
    trainer = quiet_trainer(server(), 5, callbacks=[Watch(), save], enable_checkpointing=True)
    data = classification(val=0.2)
    trainer.fit(Net(lr=0.5), datamodule=data)
    assert save.best_model_path.endswith(f"step={values.index(min(values)) + 1}.ckpt")
    found = trainer.validate(datamodule=data, ckpt_path="best", verbose=False)
    assert found[0]["val_loss"] == pytest.approx(min(values))


def test_a_checkpoint_loads_into_a_plain_module(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(), 2)
    module = Net()
    trainer.fit(module, datamodule=classification())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(x_of(Net.load_from_checkpoint(tmp_path / "x.ckpt")), x_of(module))

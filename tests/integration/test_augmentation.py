"""Random transforms draw from the place of an image in its visit, however and wherever it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import x_of
from torch import Tensor
from torchvision.transforms import v2

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.datamodules import Vision
from lightning_fed.models import MLP
from lightning_fed.partition import Dirichlet

FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
FAKE = {"size": 40, "image_size": (3, 6, 6), "num_classes": 3}
OPTIONS: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class Dropping(MLP):
    """Draws from the streams from which the transforms draw too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.2, self.training))


def blended(samples: list[Any]) -> list[Tensor]:
    """A collation that mixes images at random; it is used for evaluation too."""
    images, labels = torch.utils.data.default_collate(samples)
    return [images + torch.rand(()) * images.flip(0), labels]


def fit(
    folder: Path,
    rounds: int = 2,
    ckpt_path: Any = None,
    num_workers: int = 0,
    collate_fn: Any = None,
    **settings: Any,
) -> Tensor:
    data = Vision(
        "FakeData",
        Dirichlet(3, 1.0, min_examples=5),
        options=FAKE,
        transform=v2.Compose([v2.RandomCrop(6, padding=1), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3), *FLOATS]),
        eval_transform=v2.Compose(FLOATS),
        batch_size=4,
        loader_options={"num_workers": num_workers, "collate_fn": collate_fn},
    )
    pl.seed_everything(0, verbose=False)
    module = Dropping((108, 4, 3), log_train=False)
    server = FederatedServer(FedADMM(), clients_per_round=2, local_steps=4, evaluate_every=0, **settings)
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_epochs=rounds,
        callbacks=[server],
        accelerator="cpu",
        limit_val_batches=0,
        **OPTIONS,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / f"{rounds}.ckpt")
    return x_of(module)


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"workers": 2}], ids=str)
def test_neither_loading_processes_nor_engines_change_a_bit(tmp_path: Path, how: dict[str, int]) -> None:
    assert torch.equal(fit(tmp_path, rounds=1, **how), fit(tmp_path, rounds=1))


def test_a_collation_that_draws_does_so_from_the_place_of_its_batch(tmp_path: Path) -> None:
    run = fit(tmp_path, rounds=1, collate_fn=blended)
    assert torch.equal(fit(tmp_path, rounds=1, collate_fn=blended, num_workers=2), run)
    assert not torch.equal(fit(tmp_path, rounds=1), run)


def test_a_resumed_run_draws_the_same_images(tmp_path: Path) -> None:
    whole = fit(tmp_path, rounds=2)
    fit(tmp_path, rounds=1)
    assert torch.equal(fit(tmp_path, rounds=2, ckpt_path=tmp_path / "1.ckpt"), whole)


def test_another_seed_draws_other_images(tmp_path: Path) -> None:
    assert not torch.equal(fit(tmp_path, rounds=1), fit(tmp_path, rounds=1, seed=7))

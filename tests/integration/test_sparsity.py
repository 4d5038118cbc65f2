"""`Sparsity`: zeros by round, as they were logged, against counts made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import wandb
from helpers.modules import Net, Witness, classification, quiet_trainer
from helpers.wandb_reader import read_run
from pytorch_lightning.loggers import WandbLogger
from torch import nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import Sparsity
from lightning_fed.prox import L1, GroupLasso, Prox

ROUNDS = 4


def fitted(g: Prox, sparsity: Sparsity, folder: Path | None = None) -> Witness:
    algorithm = FedADMM(eta=1.0, g=g, start="local")
    server = FederatedServer(algorithm, clients_per_round=2, local_steps=3, seed=3, evaluate_every=0)
    logger = WandbLogger(project="test", save_dir=str(folder), offline=True) if folder else False
    witness = Witness()
    try:
        trainer = quiet_trainer(server, ROUNDS, logger=logger, callbacks=[witness, sparsity], limit_val_batches=0)
        trainer.fit(Net(), datamodule=classification())
    finally:
        wandb.finish()
    return witness


def test_zeros_and_zero_rows_of_every_round_are_logged(tmp_path: Path) -> None:
    witness = fitted(GroupLasso(0.3, on="net.0.weight", by="row"), Sparsity(), tmp_path)
    run = read_run(tmp_path)
    first = [x[: 8 * 6].view(8, 6) for x in witness.x_bar]  # 8 rows of 6 weights come first in the vector
    rows = [int(sum(not row.any() for row in weight)) for weight in first]
    assert 0 < rows[-1] < 8
    by_round = dict(enumerate(rows))
    assert run.series("sparsity/net.0.weight/filters") == by_round
    assert run.series("sparsity/net.0.weight") == pytest.approx({k: n / 8 for k, n in by_round.items()})
    assert run.series("sparsity/zeros") == pytest.approx({k: 6 * n / (48 + 8 + 24 + 3) for k, n in by_round.items()})
    assert "sparsity/net.0.bias/filters" not in run.summary


def test_only_what_is_asked_for_is_counted() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(4, 2))
    with torch.no_grad():
        module[0].weight.fill_(1.0)[1] = 0.0
        module[0].weight[0, 0] = 0.0
        module[1].bias.zero_()
    found = Sparsity(on=["0.weight"]).measure(module)
    assert found == {
        "sparsity/zeros": (8 + 4) / 24,
        "sparsity/0.weight": (8 + 4) / 24,
        "sparsity/0.weight/filters": 1.0,
    }
    assert Sparsity(on="*.bias").measure(module)["sparsity/1.bias"] == 1.0


def test_almost_zero_is_not_zero_and_minus_zero_is() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.weight.data = torch.tensor([[1e-40, 0.0], [-0.0, 0.0]])
    assert Sparsity().measure(module)["sparsity/weight/filters"] == 1.0


def test_frozen_parameters_do_not_count() -> None:
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    module.bias.requires_grad_(False)
    assert Sparsity().measure(module) == {
        "sparsity/zeros": 1.0,
        "sparsity/weight": 1.0,
        "sparsity/weight/filters": 2.0,
    }


def test_a_pattern_of_no_use_is_refused_before_the_first_round() -> None:
    with pytest.raises(ValueError, match=r"Sparsity.on='conv\*' matches none of .* net.0.weight"):
        fitted(L1(0.1), Sparsity(on="conv*"))
    with pytest.raises(ValueError, match=r"Sparsity\.on must be a pattern of names"):
        Sparsity(on=3)  # type: ignore[arg-type]

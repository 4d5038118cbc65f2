"""Clients may have any string or number as their id: every logger writes it, and nothing leaves the run's folder."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from helpers.modules import Net, classification, quiet_trainer
from helpers.strange_ids import STRANGE_IDS
from helpers.wandb_reader import read_run
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import ClientEvaluation, FederatedProgressBar
from lightning_fed.cli.commands.data import report
from lightning_fed.core.labels import label_of
from lightning_fed.tracking import AutoWandbLogger

LABELS = [label_of(cid) for cid in STRANGE_IDS]


def strange() -> FederatedDataModule:
    plain = classification(len(STRANGE_IDS))
    ids = dict(zip(plain.client_ids, STRANGE_IDS, strict=True))
    splits: dict[str, Any] = {name: {ids[cid]: d for cid, d in held.items()} for name, held in plain.splits.items()}
    return FederatedDataModule(**splits, batch_size=4)


def fit(logger: Logger, **options: Any) -> FederatedServer:
    server = FederatedServer(FedADMM(eta=2.0), clients_per_round=20, local_steps=1, seed=3, **options)
    quiet_trainer(server, 2, logger=logger, callbacks=[ClientEvaluation(2, 2)]).fit(Net(), datamodule=strange())
    return server


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run, beside which nothing may appear."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(folder))
    yield folder
    assert os.listdir(tmp_path / "runs") == ["run"]
    assert set(os.listdir(tmp_path)) <= {"runs", "cache"}
    assert not os.path.exists("/lightning-fed-escaped")


def test_csv(run: Path) -> None:
    fit(logger := CSVLogger(run, name="csv"))
    with open(Path(logger.log_dir) / "clients_table.csv", newline="", encoding="utf-8") as file:
        assert [row["client"] for row in csv.DictReader(file)] == LABELS


def test_tensorboard(run: Path) -> None:
    fit(logger := TensorBoardLogger(run, name="tensorboard"))
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0})
    events.Reload()
    text = events.Tensors("clients/table/text_summary")[0].tensor_proto.string_val[0].decode()
    first_cells = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()[2:]]
    assert first_cells == [label.replace("|", "\\|") for label in LABELS]


def test_wandb(run: Path) -> None:
    fit(AutoWandbLogger(save_dir=str(run)))
    wandb.finish()
    found = read_run(run, timeout=20)
    (reference,) = found.series("clients/table").values()
    columns, rows = found.table(reference)
    assert columns[0] == "client"
    assert [row[0] for row in rows] == LABELS


def test_the_progress_bar(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FederatedServer(FedADMM(), local_steps=1, evaluate_every=0, figure=False, engine="sequential")
    trainer = quiet_trainer(server, 1, enable_progress_bar=True, callbacks=[FederatedProgressBar(refresh_rate=1)])
    trainer.fit(Net(), datamodule=strange())
    shown = "".join(capsys.readouterr())
    assert "client" in shown
    shown.encode()


def test_the_survey_of_the_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(strange(), run / "survey")
    capsys.readouterr().out.encode()
    with open(run / "survey" / "clients.csv", newline="", encoding="utf-8") as file:
        assert [row["client"] for row in csv.DictReader(file)] == LABELS


@pytest.mark.filterwarnings("ignore:Glyph")  # no font has them all
def test_the_survey_of_images(run: Path) -> None:
    images = [(torch.zeros(1, 8, 8), 0), (torch.ones(1, 8, 8), 1)]
    for some in (STRANGE_IDS[i : i + 10] for i in range(0, len(STRANGE_IDS), 10)):
        written = report(FederatedDataModule([(cid, images) for cid in some]), run / "survey")
        assert run / "survey" / "samples.png" in written

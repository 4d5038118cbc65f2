"""Tables, figures and models in MLflow and Comet, and CSV beside the log of every logger that has a folder."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CometLogger, Logger, MLFlowLogger, TensorBoardLogger

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.tracking import log_figure, log_table
from lightning_fed.tracking.folders import append

ROUNDS, CLIENTS, STEPS = 4, 5, (1, 3)


def fit(logger: Logger, saved: Path) -> pl.Trainer:
    server = FederatedServer(FedADMM(), clients_per_round=2, local_steps=2, seed=3)
    callbacks = [ClientEvaluation(table_every_n_rounds=2), ModelCheckpoint(saved)]
    trainer = quiet_trainer(server, ROUNDS, logger=logger, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Net(), datamodule=classification(CLIENTS))
    return trainer


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


# -- MLflow -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, pl.Trainer]:
    """The folder of artifacts of a fit that MLflow has logged to local files."""
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("test", tracking_uri=f"file:{tmp_path}/mlruns", log_model=True)
    trainer = fit(logger, tmp_path / "saved")
    return tmp_path / "mlruns" / logger.experiment_id / logger.run_id / "artifacts", trainer


@pytest.mark.filterwarnings("ignore:.*select_dtypes")  # MLflow about pandas 3
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_mlflow_has_tables_a_figure_and_the_servers_model(mlflow_artifacts: tuple[Path, pl.Trainer]) -> None:
    folder, trainer = mlflow_artifacts
    pytest.importorskip("pandas", reason="MLflow's tables need pandas")
    last = trainer.fit_loop.server.clients
    for step in STEPS:
        table = json.loads((folder / "clients" / f"table_step_{step}.json").read_text())
        assert table["columns"] == ["step", *last.columns]
        assert [row[:2] for row in table["data"]] == [[step, cid] for cid in trainer.datamodule.client_ids]
    losses = [row[table["columns"].index("test_loss")] for row in table["data"]]
    assert losses == pytest.approx(last.column("test_loss"))
    assert (folder / "federated" / "figure.png").read_bytes().startswith(b"\x89PNG")
    models = list(folder.rglob("*.ckpt"))
    assert models
    assert all("callbacks" not in torch.load(path, weights_only=True) for path in models)
    Net.load_from_checkpoint(models[0], weights_only=True)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_mlflow_has_csv_where_pandas_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr("lightning_fed.tracking.tables.find_spec", lambda name: None)
    logger = MLFlowLogger("test", tracking_uri=f"file:{tmp_path}/mlruns")
    log_table([logger], "clients/table", ["client", "loss"], [["ann", 0.5], ["bob", float("nan")]], step=3)
    (path,) = tmp_path.rglob("artifacts/clients/*.csv")
    assert path.name == "table_step_3.csv"
    assert rows_of(path) == [["step", "client", "loss"], ["3", "ann", "0.5"], ["3", "bob", ""]]


# -- Comet ------------------------------------------------------------------------------------------------------


@pytest.fixture
def comet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CometLogger]:
    """A logger whose experiment is written to a local archive."""
    comet_ml = pytest.importorskip("comet_ml", reason="Comet is not installed: pip install comet_ml")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    logger = CometLogger(online=False, offline_directory=str(tmp_path / "comet"))
    quiet = dict.fromkeys(["log_code", "log_git_metadata", "log_git_patch", "auto_output_logging"], False)
    quiet |= dict.fromkeys(["log_env_details", "parse_args", "display_summary_level"], False)
    # Lightning's own is disabled when it is not online: it logs nothing at all
    vars(logger)["_experiment"] = comet_ml.OfflineExperiment(offline_directory=str(tmp_path / "comet"), **quiet)
    yield logger
    logger.experiment.end()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_comet_has_tables_histograms_and_a_figure(comet: CometLogger, tmp_path: Path) -> None:
    trainer = fit(comet, tmp_path / "saved")
    comet.experiment.end()
    (path,) = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        uploads = [m["payload"] for m in messages if m["type"] == "file_upload"]
        named: dict[str, Any] = {u["additional_params"].get("fileName"): archive.read(u["file_path"]) for u in uploads}
    for step in STEPS:
        header, *rows = csv.reader(named[f"clients/table_step_{step}.csv"].decode().splitlines())
        assert header == trainer.fit_loop.server.clients.columns
        assert [row[0] for row in rows] == trainer.datamodule.client_ids
    kinds = {u["upload_type"]: u["additional_params"] for u in uploads}
    assert kinds["histogram3d"]["step"] == STEPS[-1]
    assert any(content.startswith(b"\x89PNG") or b"<svg" in content[:2000] for content in named.values())


# -- CSV --------------------------------------------------------------------------------------------------------


class Foreign(Logger):
    """A tracker of which nobody here knows anything but its folder."""

    name, version, save_dir = "mine", 7, "logs"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class Remote(Foreign):
    save_dir = "s3://bucket/logs"


def test_every_logger_that_has_a_folder_has_the_tables_as_csv(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    loggers = [TensorBoardLogger(tmp_path, "board", "one"), Foreign(), Remote()]
    for step in (0, 1):
        log_table(loggers, "clients/table", ["client", "loss"], [["ann", 0.5 + step]], step=step)
    log_figure(loggers[1:], "clients/figure", Figure(figsize=(1, 1)), step=1)
    expected = [["step", "client", "loss"], ["0", "ann", "0.5"], ["1", "ann", "1.5"]]
    assert rows_of(tmp_path / "board" / "one" / "clients_table.csv") == expected
    assert rows_of(tmp_path / "logs" / "mine" / "version_7" / "clients_table.csv") == expected
    assert (tmp_path / "logs" / "mine" / "version_7" / "clients_figure.png").exists()
    assert not list(tmp_path.glob("s3*"))
    loggers[0].experiment.close()


def test_a_resumed_run_replaces_the_rows_that_it_comes_to_again(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for step, loss in [(0, 1.0), (1, 2.0), (2, 3.0), (1, 2.5)]:
        append(path, ["step", "loss"], [[step, loss]], step)
    assert rows_of(path) == [["step", "loss"], ["0", "1.0"], ["1", "2.5"]]

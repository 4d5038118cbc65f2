"""The same metrics, tables and figures through CSVLogger and TensorBoardLogger."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import wandb
from helpers.modules import Net, Witness, classification, measured, quiet_trainer
from helpers.wandb_reader import read_run
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.tracking import AutoWandbLogger

ROUNDS, CLIENTS, COHORT = 4, 5, 2
SCALARS = [
    *(f"federated/{name}" for name in ("objective", "train_loss", "train_accuracy", "test_loss", "test_accuracy")),
    *(f"federated/{name}" for name in ("local_loss", "local_loss_min", "local_loss_max")),
    *(f"federated/{name}" for name in ("primal_residual", "dual_residual", "bytes_up", "bytes_down")),
    *(f"federated/{name}" for name in ("clients", "seconds")),
    "train_loss",
    "train_acc",
    "val_loss",
    "val_acc",
]
TABLE = ["client", "samples", "visits", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]
TABLE += ["own_loss", "own_accuracy", "bytes_down", "bytes_up", "local_steps"]


@dataclass
class Logged:
    """A fit that was logged twice, and what was seen of it from outside."""

    csv: Path
    events: EventAccumulator
    witness: Witness
    data: FederatedDataModule
    metrics: dict[str, float]  # of the last round, as callbacks see them

    def objective(self, k: int) -> float:
        datasets = [self.data.client_dataset(cid) for cid in self.data.client_ids]
        return sum(measured(Net(), self.witness.x_bar[k], dataset)[0] for dataset in datasets) / CLIENTS


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    root = tmp_path_factory.mktemp("logs")
    loggers = [CSVLogger(root, name="csv"), TensorBoardLogger(root, name="tensorboard")]
    server = FederatedServer(FedADMM(eta=2.0), clients_per_round=COHORT, local_steps=3, seed=3)
    witness, data = Witness(), classification(CLIENTS)
    evaluation = ClientEvaluation(table_every_n_rounds=2)
    trainer = quiet_trainer(server, ROUNDS, logger=loggers, callbacks=[witness, evaluation])
    trainer.fit(Net(), datamodule=data)
    loggers[1].experiment.close()
    events = EventAccumulator(loggers[1].log_dir, size_guidance={"images": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Logged(Path(loggers[0].log_dir), events, witness, data, metrics)


def rows_of(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- CSV --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALARS)
def test_csv_has_one_value_for_every_round(logged: Logged, name: str) -> None:
    rows = [row for row in rows_of(logged.csv / "metrics.csv") if row[name]]
    assert [int(row["step"]) for row in rows] == list(range(ROUNDS))
    assert [int(row["epoch"]) for row in rows] == list(range(ROUNDS))
    assert float(rows[-1][name]) == pytest.approx(logged.metrics[name], rel=1e-6)


def test_csv_has_the_objective_that_is_computed_here(logged: Logged) -> None:
    rows = [row for row in rows_of(logged.csv / "metrics.csv") if row["federated/objective"]]
    for k, row in enumerate(rows):
        assert float(row["federated/objective"]) == pytest.approx(logged.objective(k), rel=1e-6)


def test_csv_keeps_the_metrics_of_a_round_in_one_row(logged: Logged) -> None:
    training = [row for row in rows_of(logged.csv / "metrics.csv") if row["federated/objective"]]
    assert len(training) == ROUNDS
    assert all(row[name] for row in training for name in SCALARS if not name.startswith("val_"))


def test_csv_has_a_table_of_clients_beside_it(logged: Logged) -> None:
    rows = rows_of(logged.csv / "clients_table.csv")
    assert list(rows[0]) == ["step", *TABLE]
    assert [(int(row["step"]), row["client"]) for row in rows] == [
        (step, cid) for step in (1, 3) for cid in logged.data.client_ids
    ]
    for row in rows:
        cohorts = logged.witness.cohorts[: int(row["step"]) + 1]
        assert int(row["visits"]) == sum(row["client"] in cohort for cohort in cohorts)
        dataset = logged.data.client_dataset(row["client"], "test")
        expected = measured(Net(), logged.witness.x_bar[int(row["step"])], dataset)
        assert (float(row["test_loss"]), float(row["test_accuracy"])) == pytest.approx(expected, rel=1e-6)


def test_csv_is_blank_where_a_client_was_never_asked(logged: Logged) -> None:
    unseen = [row for row in rows_of(logged.csv / "clients_table.csv") if row["visits"] == "0"]
    assert unseen
    assert {(row["own_loss"], row["own_accuracy"]) for row in unseen} == {("", "")}


def test_csv_has_the_figure_and_the_settings_beside_it(logged: Logged) -> None:
    assert (logged.csv / "federated_figure.png").read_bytes().startswith(b"\x89PNG\r\n")
    settings = (logged.csv / "hparams.yaml").read_text()
    assert "FedADMM" in settings
    assert "Uniform" in settings


# -- TensorBoard ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALARS)
def test_tensorboard_scalars_have_rounds_as_steps(logged: Logged, name: str) -> None:
    events = logged.events.Scalars(name)
    assert [event.step for event in events] == list(range(ROUNDS))
    assert events[-1].value == pytest.approx(logged.metrics[name], rel=1e-6)


def test_tensorboard_has_the_objective_that_is_computed_here(logged: Logged) -> None:
    for k, event in enumerate(logged.events.Scalars("federated/objective")):
        assert event.value == pytest.approx(logged.objective(k), rel=1e-6)


@pytest.mark.parametrize("column", TABLE[2:])
def test_tensorboard_has_histograms_over_clients(logged: Logged, column: str) -> None:
    histograms = logged.events.Histograms(f"clients/{column}")
    assert [event.step for event in histograms] == [1, 3]
    for event in histograms:
        asked = len({cid for cohort in logged.witness.cohorts[: event.step + 1] for cid in cohort})
        assert event.histogram_value.num == (asked if column.startswith("own_") else CLIENTS)


def test_tensorboard_has_the_table_as_text(logged: Logged) -> None:
    tables = logged.events.Tensors("clients/table/text_summary")
    assert [event.step for event in tables] == [1, 3]
    header, rule, *rows = tables[-1].tensor_proto.string_val[0].decode().splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == TABLE
    assert set(rule) <= set("|- ")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == logged.data.client_ids
    assert {len(row) for row in cells} == {len(TABLE)}


def test_tensorboard_is_blank_where_a_client_was_never_asked(logged: Logged) -> None:
    first = logged.events.Tensors("clients/table/text_summary")[0].tensor_proto.string_val[0].decode()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in first.splitlines()]
    unseen = [row[7:9] for row in cells if row[2] == "0"]
    assert unseen
    assert unseen == [["", ""]] * len(unseen)


def test_tensorboard_has_the_figure_once(logged: Logged) -> None:
    (image,) = logged.events.Images("federated/figure")
    assert image.step == ROUNDS - 1
    assert image.encoded_image_string.startswith(b"\x89PNG\r\n")
    assert image.width > image.height > 100


def test_tensorboard_has_the_settings(logged: Logged) -> None:
    text = "".join(path.read_text() for path in Path(logged.events.path).glob("hparams.yaml"))
    assert "FedADMM" in text
    assert "eta: 2.0" in text


def test_wandb_writes_where_it_is_told_whatever_folder_its_process_lives_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        AutoWandbLogger(save_dir="run").log_metrics({"a": 1.0}, step=0)
        wandb.finish()
        assert read_run(tmp_path / name / "run", timeout=20).history[0]["a"] == 1.0

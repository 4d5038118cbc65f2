"""Every metric that a module logs is kept by client, with its spread, in all loggers."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import wandb
from helpers.evaluated import blank, rows_of
from helpers.modules import Net, Witness, classification, quiet_trainer, x_of
from helpers.wandb_reader import OfflineRun, read_run, wandb_at
from numpy.typing import NDArray
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError, Metric, MetricCollection, R2Score
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, BinaryPrecision, BinaryRecall

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import ClientEvaluation, FinalFigure
from lightning_fed.callbacks.figure import draw
from lightning_fed.evaluation.evaluate import EvaluationError
from lightning_fed.tracking import log_table

CLIENTS, BATCH, DECILE = 12, 4, "federated/val_mae_worst_decile"


class Extremes(Metric):
    """A metric whose value is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("low", torch.tensor(math.inf), dist_reduce_fx="min")

    def update(self, values: Tensor) -> None:
        self.low = torch.minimum(self.low, values.min())

    def compute(self) -> dict[str, Tensor]:
        return {"low": self.low}


class Regression(pl.LightningModule):
    """Logs other metrics in training than in validation, in every way that Lightning knows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64))
        self.train_mae, self.mae, self.r2, self.auroc = (
            MeanAbsoluteError(),
            MeanAbsoluteError(),
            R2Score(),
            BinaryAUROC(),
        )
        parts: list[Metric] = [BinaryF1Score(), BinaryPrecision(), BinaryRecall()]
        self.signs = MetricCollection(parts, prefix="val/")
        self.extremes = Extremes()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.train_mae.update((x @ self.w).detach(), y)
        self.log("train_mae", self.train_mae, on_step=False, on_epoch=True)
        loss = (x @ self.w - y).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        guess = x @ self.w
        self.log("val_loss", (guess - y).square().mean())
        for metric in (self.mae, self.r2):
            metric.update(guess, y)
        self.auroc.update(guess.sigmoid(), (y > 0).long())
        self.signs.update(guess.sigmoid(), (y > 0).long())
        self.extremes.update(guess)
        self.log("val_mae", self.mae, on_step=False, on_epoch=True)
        self.log_dict({"val_r2": self.r2, "val_auroc": self.auroc, "extremes": self.extremes}, on_epoch=True)
        self.log_dict(self.signs, on_step=False, on_epoch=True)
        self.log("val rmse, by batch", (guess - y).square().mean().sqrt())
        self.log("score", float(guess.mean()))
        self.log("drift", float(y.mean()), on_step=True, on_epoch=True)
        self.log("rows", float(len(y)), reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def regression() -> FederatedDataModule:
    """Unlike clients with validation data, some of several batches."""
    g = torch.Generator().manual_seed(0)
    train, val = {}, {}
    for i in range(CLIENTS):
        n = 5 + i
        x = torch.randn(2 * n, 3, generator=g, dtype=torch.float64)
        y = x @ torch.randn(3, generator=g, dtype=torch.float64) + 0.3 * torch.randn(2 * n, generator=g).double()
        y[::2], y[1::2] = y[::2].abs(), -y[1::2].abs()  # everybody has both signs
        train[f"c{i}"], val[f"c{i}"] = TensorDataset(x[:n], y[:n]), TensorDataset(x[n:], y[n:])
    return FederatedDataModule(train, val=val, batch_size=BATCH, eval_batch_size=BATCH)


def expected(w: Tensor, dataset: TensorDataset) -> dict[str, float]:
    """All metrics of validation, straight from their definitions."""
    x, y = (part.numpy() for part in dataset.tensors)
    guess: NDArray[Any] = x @ w.numpy()
    error, truth = guess - y, y > 0
    said, pairs = 1 / (1 + np.exp(-guess)) > 0.5, np.subtract.outer(guess[truth], guess[~truth])
    hits = int((said & truth).sum())
    cuts = [slice(at, at + BATCH) for at in range(0, len(y), BATCH)]
    by_batch = [(len(y[cut]), np.sqrt((error[cut] ** 2).mean())) for cut in cuts]
    return {
        "loss": (error**2).mean(),
        "mae": np.abs(error).mean(),
        "r2": 1 - (error**2).sum() / ((y - y.mean()) ** 2).sum(),
        "auroc": ((pairs > 0) + 0.5 * (pairs == 0)).mean(),
        "BinaryF1Score": 2 * hits / (said.sum() + truth.sum()),
        "BinaryPrecision": hits / max(said.sum(), 1),
        "BinaryRecall": hits / truth.sum(),
        "rmse_by_batch": sum(n * rmse for n, rmse in by_batch) / len(y),
        "score": guess.mean(),
        "drift": y.mean(),
        "rows": float(len(y)),
    }


METRICS = ["loss", "mae", "r2", "auroc", "BinaryF1Score", "BinaryPrecision", "BinaryRecall"]
METRICS += ["rmse_by_batch", "score", "drift", "rows"]
HIGHER = {"loss": False, "mae": False, "rmse_by_batch": False, "drift": None, "rows": None}


@dataclass
class Run:
    """A fit that early stopping ended after two rounds, with all that its loggers and callbacks have."""

    trainer: pl.Trainer
    server: FederatedServer
    witness: Witness
    data: FederatedDataModule
    checkpoint: ModelCheckpoint
    figure: FinalFigure
    tracked: OfflineRun
    folder: Path
    lines: list[str]

    def by_client(self, metric: str, w: Tensor | None = None, split: str = "val") -> list[float]:
        x = self.witness.x_bar[-1] if w is None else w
        return [expected(x, self.data.client_dataset(cid, split))[metric] for cid in self.data.client_ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("run")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    spoken = logging.getLogger("lightning_fed")
    before = spoken.level
    with pytest.MonkeyPatch.context() as patch:
        wandb_at(patch, home)
        spoken.addHandler(handler)
        spoken.setLevel("INFO")
        try:
            yield fit(folder, lines)
        finally:
            spoken.removeHandler(handler)
            spoken.setLevel(before)


def fit(folder: Path, lines: list[str]) -> Run:
    loggers = [
        CSVLogger(folder, "csv"),
        WandbLogger(project="test", save_dir=str(folder / "wandb"), offline=True),
        TensorBoardLogger(folder, "board"),
    ]
    (folder / "wandb").mkdir()
    server = FederatedServer(FedADMM(eta=1.0), clients_per_round=5, local_steps=3, seed=2)
    evaluation = ClientEvaluation(table_every_n_rounds=1, higher_is_better={"score": True})
    checkpoint = ModelCheckpoint(folder / "kept", monitor=DECILE, mode="min", filename="best")
    stopping = EarlyStopping(DECILE, min_delta=1e9, patience=1, mode="min", check_on_train_epoch_end=True)
    witness, figure, data = Witness(), FinalFigure(folder / "figure.png"), regression()
    trainer = quiet_trainer(
        server,
        5,
        logger=loggers,
        callbacks=[witness, evaluation, checkpoint, stopping, figure],
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    try:
        trainer.fit(Regression(), datamodule=data)
    finally:
        wandb.finish()
    tracked = read_run(folder / "wandb")
    return Run(trainer, server, witness, data, checkpoint, figure, tracked, folder, lines)


def test_the_mean_of_every_metric_is_weighted_by_samples(run: Run) -> None:
    sizes = [len(run.data.client_dataset(cid, "val")) for cid in run.data.client_ids]
    for metric in METRICS:
        mean = np.average(run.by_client(metric), weights=sizes)
        assert float(run.trainer.callback_metrics[f"federated/val_{metric}"]) == pytest.approx(mean, rel=1e-5), metric


def test_training_data_are_measured_by_the_training_step(run: Run) -> None:
    found = {name for name in run.trainer.callback_metrics if name.startswith("federated/train_")}
    assert found == {"federated/train_loss", "federated/train_mae"}  # and no spread, which is of held-out data
    sizes = [len(run.data.client_dataset(cid)) for cid in run.data.client_ids]
    mean = np.average(run.by_client("mae", split="train"), weights=sizes)
    assert float(run.trainer.callback_metrics["federated/train_mae"]) == pytest.approx(mean, rel=1e-6)


def test_the_spread_over_clients_is_that_of_their_values(run: Run) -> None:
    for metric in METRICS:
        values, name = run.by_client(metric), f"federated/val_{metric}"
        found = {
            key.removeprefix(name): float(v) for key, v in run.trainer.callback_metrics.items() if key.startswith(name)
        }
        assert found["_sd"] == pytest.approx(np.std(values), rel=1e-4, abs=1e-12), metric
        higher = HIGHER.get(metric, True)
        if higher is None:
            assert set(found) == {"", "_sd"}
            continue
        worst = sorted(values, reverse=not higher)[:2]  # of 12 clients
        assert found["_worst"] == pytest.approx(worst[0], rel=1e-5, abs=1e-7), metric
        assert found["_worst_decile"] == pytest.approx(sum(worst) / 2, rel=1e-5, abs=1e-7), metric


def test_early_stopping_and_checkpoints_follow_the_worst_decile(run: Run) -> None:
    assert run.trainer.global_step == 2
    rows = rows_of(run.folder / "csv" / "version_0" / "metrics.csv")
    series = [float(row[DECILE]) for row in rows if row[DECILE]]
    assert len(series) == 2
    assert float(run.checkpoint.best_model_score) == pytest.approx(min(series), rel=1e-12)
    saved = torch.load(run.checkpoint.best_model_path, weights_only=False)["state_dict"]["w"]
    assert torch.equal(saved, run.witness.x_bar[series.index(min(series))])


def test_the_worst_clients_are_named_in_the_report_and_in_the_log(run: Run) -> None:
    values = run.by_client("mae")
    worst = run.data.client_ids[values.index(max(values))]
    assert run.server.report.worst_clients["val_mae"] == worst
    assert {name.removeprefix("val_") for name in run.server.report.worst_clients if name.startswith("val_")} == {
        metric for metric in METRICS if HIGHER.get(metric, True) is not None
    }
    (line,) = [line for line in run.lines if line.startswith("Worst clients of round 1:")]
    assert f"val_mae {max(values):.4g} ({worst})" in line


def test_what_is_no_number_or_has_no_known_side_is_told_once(run: Run) -> None:
    assert [line for line in run.lines if "'extremes'" in line] == [
        "Metric 'extremes' of Regression is left out: its value is not a single number."
    ]
    for metric in ("drift", "rows"):
        (line,) = [line for line in run.lines if line.startswith(f"Metric '{metric}'")]
        assert "has no worst clients" in line
        assert f"higher_is_better={{'{metric}': True}}" in line


def table(run: Run) -> list[dict[str, Any]]:
    (*_, reference) = run.tracked.series("clients/table").values()
    columns, rows = run.tracked.table(reference)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_the_table_has_every_metric_of_every_client_and_of_its_own_model(run: Run) -> None:
    rows = table(run)
    assert [row["client"] for row in rows] == run.data.client_ids
    own = run.witness.x_i[-1]
    assert 0 < len(own) < CLIENTS
    for row in rows:
        dataset = run.data.client_dataset(row["client"], "val")
        measured = {f"val_{metric}": value for metric, value in expected(run.witness.x_bar[-1], dataset).items()}
        if row["client"] in own:
            measured |= {f"own_{metric}": value for metric, value in expected(own[row["client"]], dataset).items()}
        else:
            assert all(row[f"own_{metric}"] is None for metric in METRICS)
        assert {name: row[name] for name in measured} == pytest.approx(measured, rel=1e-5, abs=1e-7)
    assert not any("extremes" in name for name in rows[0])


def test_the_table_is_the_same_in_a_csv_log(run: Run) -> None:
    rows = [row for row in rows_of(run.folder / "csv" / "version_0" / "clients_table.csv") if row["step"] == "1"]
    for found, logged in zip(table(run), rows, strict=True):
        assert set(logged) == {*found, "step"}
        for name, value in found.items():
            assert blank(logged[name]) if value is None else logged[name] == str(value), name


def test_every_metric_has_a_histogram_over_clients(run: Run) -> None:
    rows = table(run)
    for name in (f"{kind}_{metric}" for kind in ("val", "own") for metric in METRICS):
        (*_, histogram) = run.tracked.series(f"clients/{name}").values()
        assert sum(histogram["values"]) == sum(row[name] is not None for row in rows), name


def test_every_figure_reaches_tensorboard_under_its_name(run: Run) -> None:
    events = EventAccumulator(str(run.folder / "board" / "version_0"))
    events.Reload()
    logged = {name for name in run.trainer.callback_metrics if name.startswith("federated/val_")}
    assert "federated/val_rmse_by_batch_worst_decile" in logged
    assert logged <= set(events.Tags()["scalars"])


def test_a_table_by_metric_has_spreads_and_worst_clients(run: Run) -> None:
    (*_, reference) = run.tracked.series("clients/spread").values()
    columns, rows = run.tracked.table(reference)
    assert columns == ["metric", "mean", "sd", "worst_decile", "worst", "worst_client"]
    by_metric = {row[0]: row[1:] for row in rows}
    assert {f"{kind}_{metric}" for kind in ("val", "own") for metric in METRICS} <= by_metric.keys()
    metrics = run.trainer.callback_metrics
    for metric in METRICS:
        names = [f"federated/val_{metric}{figure}" for figure in ("", "_sd", "_worst_decile", "_worst")]
        logged = [float(metrics[name]) if name in metrics else None for name in names]
        assert by_metric[f"val_{metric}"] == [*logged, run.server.report.worst_clients.get(f"val_{metric}")]
    own = [(expected(x, run.data.client_dataset(cid, "val"))["mae"], cid) for cid, x in run.witness.x_i[-1].items()]
    assert by_metric["own_mae"][3:] == [pytest.approx(max(own)[0], rel=1e-5), max(own)[1]]


def test_the_figure_has_further_metrics_with_a_band_to_the_worst_decile(run: Run) -> None:
    assert (run.folder / "figure.png").stat().st_size > 5000
    figure = draw(run.figure.history)
    headings = [axes.get_title() for axes in figure.axes]
    assert headings[:5] == ["Objective and loss", "mae", "r2", "auroc", "BinaryF1Score"]
    assert len(headings) == 5  # megabytes are an axis above, because rounds send equal amounts
    mae = figure.axes[1]
    assert [line.get_label() for line in mae.get_lines()] == ["train mae", "val mae"]
    (band,) = mae.collections
    corners = {(round(x), round(y, 9)) for x, y in band.get_paths()[0].vertices}
    for row in run.figure.history:
        for name in ("federated/val_mae", DECILE):
            assert (row["round"] + 1, round(row[name], 9)) in corners


def test_a_metric_without_a_worse_side_has_a_band_of_its_deviation() -> None:
    row = {"federated/test_loss": 1.0, "federated/test_score": 3.0, "federated/test_score_sd": 0.5}
    axes = draw([{"round": 0, **row}, {"round": 1, **row}]).axes[1]
    (band,) = axes.collections
    assert {y for _, y in band.get_paths()[0].vertices} == {2.5, 3.5}


def test_own_models_are_those_of_the_played_round_in_every_store(tmp_path: Path) -> None:
    tables = []
    for store in ("memory", "disk"):
        server = FederatedServer(FedADMM(), clients_per_round=5, local_steps=2, seed=1, figure=False, store=store)
        logger, evaluation = CSVLogger(tmp_path, store), ClientEvaluation(table_every_n_rounds=1)
        options = {"logger": logger, "callbacks": [evaluation], "limit_val_batches": 0}
        trainer = quiet_trainer(server, 2, **options)
        trainer.fit(Regression(), datamodule=regression())
        tables.append(rows_of(Path(logger.log_dir) / "clients_table.csv"))
    assert tables[0] == tables[1]
    first = [row for row in tables[0] if row["step"] == "0"]
    assert sum(not blank(row["own_mae"]) for row in first) == sum(row["visits"] == "1" for row in first) == 5


@pytest.mark.parametrize(("spread", "splits"), [("none", []), ("all", ["train", "val"])])
def test_spread_chooses_whose_spread_is_logged(spread: Any, splits: list[str]) -> None:
    server = FederatedServer(FedADMM(), clients_per_round=1, local_steps=1, figure=False)
    trainer = quiet_trainer(server, 1, callbacks=[ClientEvaluation(spread=spread)], limit_val_batches=0)
    trainer.fit(Regression(), datamodule=regression())
    found = {name for name in trainer.callback_metrics if name.endswith("mae_worst")}
    assert found == {f"federated/{split}_mae_worst" for split in splits}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"higher_is_better": {"score": "yes"}}, r"higher_is_better must map names of metrics.*got 'score': 'yes'"),
        ({"spread": "some"}, "spread"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ClientEvaluation(**arguments)


def test_a_side_of_a_metric_that_is_not_logged_is_told() -> None:
    evaluation = ClientEvaluation(higher_is_better={"scroe": True})
    server = FederatedServer(FedADMM(), clients_per_round=1, local_steps=1, figure=False)
    with pytest.warns(UserWarning, match=r"names 'scroe', which is not logged.*'accuracy', 'loss'"):
        quiet_trainer(server, 1, callbacks=[evaluation]).fit(Net(), datamodule=classification())


def test_a_csv_table_takes_columns_that_come_later(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    log_table([logger], "t", ["client", "f1"], [["a", 0.5]], 0)
    log_table([logger], "t", ["client", "mae", "f1"], [["a", 2.0, 0.25]], 1)
    log_table([logger], "t", ["client", "mae", "f1"], [["b", 3.0, None]], 2)
    with (Path(logger.log_dir) / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["client"], row["f1"], row["mae"]) for row in rows] == [
        ("0", "a", "0.5", ""),
        ("1", "a", "0.25", "2.0"),
        ("2", "b", "", "3.0"),
    ]


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ("test", r"Fails\.validation_step on the test data of client 'c2': ZeroDivisionError: no luck"),
        ("train", r"The gradient of the loss on the train data of client 'c2': ZeroDivisionError: no luck"),
    ],
    ids=["own model", "gradient mapping"],
)
def test_an_error_at_an_own_model_or_a_gradient_undoes_the_round(split: str, text: str, tmp_path: Path) -> None:
    data = classification(eval_batch_size=100)
    data.setup("fit")
    mark = data.client_dataset("c2", split).tensors[0][0]
    calls: list[int] = []  # not in the module, where evaluation takes it back

    class Fails(Net):
        def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
            if not self.training and torch.equal(batch[0][0], mark):
                calls.append(1)
                if len(calls) == 2:  # the first one was at the server's model
                    raise ZeroDivisionError("no luck")
            return super()._loss(batch, stage)

    def trainer(module: pl.LightningModule) -> tuple[FederatedServer, pl.Trainer]:
        server = FederatedServer(FedADMM(), local_steps=2, seed=1, figure=False)
        evaluation = ClientEvaluation(table_every_n_rounds=1, gradient_mapping=True)
        options = {"logger": CSVLogger(tmp_path), "limit_val_batches": 0}
        return server, quiet_trainer(server, 1, callbacks=[evaluation], **options)

    module, straight = Fails(), Net()
    server, fails = trainer(module)
    with pytest.raises(EvaluationError, match=text):
        fails.fit(module, datamodule=data)
    assert server.rounds_done == fails.global_step == len(server.federation.store) == 0
    assert server.report is None
    assert torch.equal(x_of(module), x_of(Net()))
    fails.fit(module, datamodule=data)
    _, whole = trainer(straight)
    whole.fit(straight, datamodule=data)
    assert torch.equal(x_of(module), x_of(straight))
    name = "federated/gradient_mapping"
    assert float(fails.callback_metrics[name]) == float(whole.callback_metrics[name])

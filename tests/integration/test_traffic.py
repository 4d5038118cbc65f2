"""Bytes by round and by client, as W&B has them, against counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import wandb
from helpers.modules import Net, Witness, classification, quiet_trainer
from helpers.wandb_reader import OfflineRun, read_run
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor, nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedAvg, FedDR, FedLin, FedPAQ, Scaffold
from lightning_fed.callbacks import FinalFigure
from lightning_fed.callbacks.figure import draw
from lightning_fed.transforms import Quantize, TopK

ROUNDS, CLIENTS, COHORT, STEPS = 3, 4, 2, 2
MODEL = 18 * 4  # bytes of the 6 x 3 weights in float32


class Tiny(pl.LightningModule):
    """18 weights, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.log("acc", (logits.argmax(1) == batch[1]).float().mean())
        return nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def logged(algorithm: Algorithm, folder: Path, module: pl.LightningModule | None = None) -> tuple[OfflineRun, Witness]:
    cohort = None if algorithm.traits.everybody else COHORT
    server = FederatedServer(algorithm, clients_per_round=cohort, local_steps=STEPS, seed=3)
    logger, witness = WandbLogger(project="test", save_dir=str(folder), offline=True), Witness()
    try:
        trainer = quiet_trainer(server, ROUNDS, logger=logger, callbacks=[witness], limit_val_batches=0)
        trainer.fit(module or Tiny(), datamodule=classification(CLIENTS))
    finally:
        wandb.finish()
    return read_run(folder), witness


#: bytes that an active client receives and sends in a round, and what it has sent before the first
BY_HAND = [
    pytest.param(FedAvg(), MODEL, MODEL, 0, id="FedAvg"),
    pytest.param(FedADMM(), MODEL, MODEL, 0, id="FedADMM"),
    pytest.param(FedDR(init="prox"), MODEL, MODEL, MODEL, id="FedDR-prox"),
    pytest.param(Scaffold(), 2 * MODEL, 2 * MODEL, 0, id="Scaffold: model and control variate"),
    pytest.param(FedLin(), 2 * MODEL, 2 * MODEL, MODEL, id="FedLin: models and gradients, those at x0 first"),
    pytest.param(FedPAQ(levels=16), MODEL, 18, 0, id="FedPAQ: 32 bits, and 1 + 5 for each weight"),
    pytest.param(Compressed(FedADMM(), Quantize(4)), MODEL, 13, 0, id="Quantize: 32 bits, and 1 + 3 for each weight"),
    pytest.param(Compressed(FedADMM(), TopK(4)), MODEL, 4 * (4 + 4), 0, id="TopK: four entries and their indices"),
]


@pytest.mark.filterwarnings("ignore:.* adds noise")
@pytest.mark.parametrize(("algorithm", "down", "up", "before"), BY_HAND)
def test_bytes_by_round_and_by_client_are_those_counted_by_hand(
    algorithm: Algorithm, down: int, up: int, before: int, tmp_path: Path
) -> None:
    run, witness = logged(algorithm, tmp_path)
    size = CLIENTS if algorithm.traits.everybody else COHORT
    down_before = 0 if isinstance(algorithm, FedLin) else before  # clients hold x0 already, FedDR sends it again
    rounds = range(ROUNDS)
    totals = {k: (k + 1) * size * down + CLIENTS * down_before for k in rounds}
    assert run.series("federated/bytes_down") == totals
    assert run.series("federated/bytes_up") == {k: (k + 1) * size * up + CLIENTS * before for k in rounds}
    (reference,) = run.series("clients/table").values()
    columns, rows = run.table(reference)
    by_client = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    for cid, row in by_client.items():
        visits = sum(cid in cohort for cohort in witness.cohorts)
        assert (row["bytes_down"], row["bytes_up"]) == (visits * down + down_before, visits * up + before)
    assert sum(row["bytes_up"] for row in by_client.values()) == run.summary["federated/bytes_up"]
    assert sum(row["local_steps"] for row in by_client.values()) == run.summary["federated/local_steps"]


@pytest.mark.parametrize(
    ("algorithm", "steps", "gradients"),
    [
        (FedADMM(), [4, 8, 12], [0, 0, 0]),
        (FedDR(init="prox"), [8 + 4, 8 + 8, 8 + 12], [0, 0, 0]),
        (Scaffold(option=1), [4, 8, 12], [2, 4, 6]),
        (FedLin(), [8, 16, 24], [4 + 4, 4 + 8, 4 + 12]),
        (Compressed(Scaffold(option=1), Quantize(8)), [4, 8, 12], [2, 4, 6]),
    ],
    ids=["FedADMM", "FedDR-prox", "Scaffold", "FedLin", "Compressed"],
)
def test_local_work_is_counted(algorithm: Algorithm, steps: list[int], gradients: list[int], tmp_path: Path) -> None:
    figure = FinalFigure()
    server = FederatedServer(
        algorithm, None if algorithm.traits.everybody else COHORT, local_steps=STEPS, evaluate_every=0
    )
    quiet_trainer(server, ROUNDS, callbacks=[figure]).fit(Tiny(), datamodule=classification(CLIENTS))
    assert [row["federated/local_steps"] for row in figure.history] == steps
    assert [row["federated/full_gradients"] for row in figure.history] == gradients


def test_running_statistics_travel_both_ways_with_every_active_client(tmp_path: Path) -> None:
    run, witness = logged(FedAvg(), tmp_path, Net(norm=True))
    weights = 6 * 8 + 8 + 8 + 8 + 8 * 3 + 3
    size = weights * 4 + 8 * 4 + 8 * 4 + 8  # mean, variance, and a counter of 64 bits
    (reference,) = run.series("clients/table").values()
    columns, rows = run.table(reference)
    for row in rows:
        visits = sum(row[0] in cohort for cohort in witness.cohorts)
        assert [row[columns.index(name)] for name in ("bytes_down", "bytes_up")] == [visits * size] * 2


def test_accuracy_and_bytes_of_a_round_stand_in_one_row(tmp_path: Path) -> None:
    run, _ = logged(FedAvg(), tmp_path)
    rows = [row for row in run.history if "federated/test_accuracy" in row]
    assert [row["federated/bytes_up"] for row in rows] == [COHORT * MODEL * k for k in (1, 2, 3)]


def curves(figure: Figure, xlabel: str) -> dict[str, list[tuple[float, float]]]:
    lines = [line for axes in figure.axes if axes.get_xlabel() == xlabel for line in axes.get_lines()]
    return {line.get_label(): list(zip(*map(list, line.get_data()), strict=True)) for line in lines}


def test_the_figure_shows_accuracy_and_loss_by_megabytes_too_where_rounds_send_unlike_amounts() -> None:
    history = [
        {"round": k, "federated/bytes_down": 1e6 * k**2, "federated/bytes_up": 5e5 * k**2, **evaluated}
        for k, evaluated in enumerate([{}, {"federated/test_accuracy": 0.5, "federated/objective": 2.0}, {}, {}])
    ]
    figure = draw(history)
    assert curves(figure, "round") == {"objective": [(2, 2.0)], "test accuracy": [(2, 0.5)]}
    assert curves(figure, "megabytes received and sent") == {"objective": [(1.5, 2.0)], "test accuracy": [(1.5, 0.5)]}


def test_a_resumed_run_goes_on_counting_bytes_of_rounds_and_clients(tmp_path: Path) -> None:
    def fit(rounds: int, folder: Path, ckpt_path: str | None = None) -> tuple[list[float], list[object]]:
        figure, save = FinalFigure(), ModelCheckpoint(folder, save_last=True)
        server = FederatedServer(Compressed(FedADMM(), TopK(4)), COHORT, local_steps=STEPS, seed=3)
        trainer = quiet_trainer(server, rounds, callbacks=[figure, save], enable_checkpointing=True)
        trainer.fit(Tiny(), datamodule=classification(CLIENTS), ckpt_path=ckpt_path)
        federation = server.federation
        assert federation is not None
        bytes_up = [row["federated/bytes_up"] for row in figure.history]
        return bytes_up, [federation.store[cid].cost for cid in federation.client_ids]

    fit(2, tmp_path / "parts")
    resumed = fit(5, tmp_path / "parts", "last")
    assert resumed == fit(5, tmp_path / "whole")
    assert resumed[0] == [64, 128, 192, 256, 320]

"""What evaluation measures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.evaluated import (
    ACCURACY,
    blank,
    metrics_of,
    rows_of,
    server,
    table_of,
)
from helpers.modules import Net, Witness, classification, measured, quiet_trainer, x_of
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedProx
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback
from lightning_fed.prox import L1, Box


def objective(x: Tensor, data: FederatedDataModule, weights: str = "uniform") -> float:
    losses = {cid: measured(Net(), x, data.client_dataset(cid))[0] for cid in data.client_ids}
    w = {cid: data.num_examples(cid) if weights == "samples" else 1 for cid in losses}
    return sum(w[cid] * losses[cid] for cid in losses) / sum(w.values())


@pytest.mark.parametrize(
    ("algorithm", "weights"),
    [
        (FedADMM(), "uniform"),
        (FedADMM(weights="samples"), "samples"),
        (FedDR(weights="samples"), "samples"),
        (FedDR(init="prox"), "uniform"),
        (FedAvg(), "samples"),
        (FedAvg(weights="uniform"), "uniform"),
        (FedProx(), "samples"),
    ],
    ids=repr,
)
def test_the_objective_has_the_weights_of_the_algorithm(algorithm: Algorithm, weights: str) -> None:
    data, module = classification(), Net()
    trainer = quiet_trainer(server(algorithm), 2)
    trainer.fit(module, datamodule=data)
    assert metrics_of(trainer)["federated/objective"] == pytest.approx(objective(x_of(module), data, weights), rel=1e-6)


def test_the_objective_includes_g_and_the_loss_does_not() -> None:
    data, module = classification(), Net()
    trainer = quiet_trainer(server(FedADMM(g=L1(0.1), weights="samples")), 2)
    trainer.fit(module, datamodule=data)
    metrics = metrics_of(trainer)
    g = 0.1 * float(x_of(module).abs().sum())
    assert g > 0.1
    assert metrics["federated/objective"] - metrics["federated/train_loss"] == pytest.approx(g, rel=1e-5)


@pytest.mark.parametrize("eval_batch_size", [1, 3, 1024])
def test_the_objective_does_not_depend_on_the_batches_of_evaluation(eval_batch_size: int) -> None:
    data, module = classification(eval_batch_size=eval_batch_size), Net()
    trainer = quiet_trainer(server(), 2)
    trainer.fit(module, datamodule=data)
    metrics = metrics_of(trainer)
    assert metrics["federated/objective"] == pytest.approx(objective(x_of(module), data), rel=1e-5)
    held_out = [measured(Net(), x_of(module), data.client_dataset(cid, "test"))[1] for cid in data.client_ids]
    assert metrics[ACCURACY] == pytest.approx(sum(held_out) / len(held_out), rel=1e-5)  # 4 samples everywhere


def test_an_indicator_is_logged_as_a_violation_and_never_as_infinity(tmp_path: Path) -> None:
    data, module, logger = classification(), Net(), CSVLogger(tmp_path)
    trainer = quiet_trainer(server(FedADMM(g=Box(-0.1, 0.1))), 3, logger=logger)
    trainer.fit(module, datamodule=data)
    rows = [row for row in rows_of(Path(logger.log_dir) / "metrics.csv") if row["federated/objective"]]
    assert [float(row["federated/violation"]) for row in rows] == [0.0] * 3
    assert all(math.isfinite(float(value)) for row in rows for value in row.values() if value)
    assert float(rows[-1]["federated/objective"]) == pytest.approx(objective(x_of(module), data), rel=1e-6)


def test_there_is_no_violation_without_a_constraint() -> None:
    trainer = quiet_trainer(server(FedADMM(g=L1(0.1))), 1)
    trainer.fit(Net(), datamodule=classification())
    assert "federated/violation" not in trainer.callback_metrics


def test_the_gradient_mapping_is_logged_only_when_asked_for() -> None:
    trainer = quiet_trainer(server(), 1)
    trainer.fit(Net(), datamodule=classification())
    assert "federated/gradient_mapping" not in trainer.callback_metrics


def test_the_gradient_mapping_of_a_solution_is_zero() -> None:
    class Mean(pl.LightningModule):
        """f_i(w) = |w - mean_i|^2 / 2 + constant: the solution is the mean of the clients' means."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return 0.5 * (self.w - batch[0]).square().sum(1).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)  # exact in one step, with eta = 1

    g = torch.Generator().manual_seed(0)
    points = [torch.randn(5 + i, 3, generator=g, dtype=torch.float64) for i in range(3)]
    data, module = FederatedDataModule([TensorDataset(p) for p in points], batch_size=100), Mean()
    trainer = quiet_trainer(
        server(FedADMM(eta=1.0), clients_per_round=None, local_steps=1),
        40,
        callbacks=[ClientEvaluation(every_n_rounds=40, gradient_mapping=True)],
    )
    trainer.fit(module, datamodule=data)
    solution = sum(p.mean(0) for p in points) / 3
    assert torch.allclose(module.w, solution, atol=1e-8)
    assert metrics_of(trainer)["federated/gradient_mapping"] < 1e-7


def test_own_models_are_measured_under_other_names_and_unseen_clients_are_blank(tmp_path: Path) -> None:
    data, module, witness = classification(5), Net(), Witness()
    trainer = quiet_trainer(server(), 2, callbacks=[witness], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(module, datamodule=data)
    for row in table_of(tmp_path):
        test = data.client_dataset(row["client"], "test")
        x_bar = measured(Net(), witness.x_bar[-1], test)
        assert (float(row["test_loss"]), float(row["test_accuracy"])) == pytest.approx(x_bar, rel=1e-6)
        if row["client"] in witness.x_i[-1]:
            own = measured(Net(), witness.x_i[-1][row["client"]], test)
            assert float(row["own_loss"]) == pytest.approx(own[0], rel=1e-6) != x_bar[0]
            assert float(row["own_accuracy"]) == pytest.approx(own[1])
        else:
            assert blank(row["own_loss"])
            assert blank(row["own_accuracy"])
            assert row["visits"] == "0"
    assert not any("own_" in name for name in trainer.callback_metrics)


def test_algorithms_without_local_models_have_blank_own_columns(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(FedAvg()), 1, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert all(blank(row["own_loss"]) and blank(row["own_accuracy"]) for row in table_of(tmp_path))
    assert sum(int(row["visits"]) for row in table_of(tmp_path)) == 2


def test_own_models_have_their_own_buffers_when_buffers_are_local(tmp_path: Path) -> None:
    class Kept(FederatedCallback):
        def __init__(self) -> None:
            self.models: dict[Any, nn.Module] = {}

        def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
            self.models[visit.client] = Net(norm=True)
            self.models[visit.client].load_state_dict(module.state_dict())

    data, module, kept = classification(drop_last=True), Net(norm=True), Kept()
    trainer = quiet_trainer(server(buffers="local"), 2, callbacks=[kept], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(module, datamodule=data)
    assert kept.models
    for row in table_of(tmp_path):
        test = data.client_dataset(row["client"], "test")
        assert float(row["test_loss"]) == pytest.approx(measured(module, x_of(module), test)[0], rel=1e-6)
        if row["client"] in kept.models:
            own = kept.models[row["client"]]
            assert float(row["own_loss"]) == pytest.approx(measured(own, x_of(own), test)[0], rel=1e-6)
            stranger = Net(norm=True)  # the same x_i with the server's buffers would score otherwise
            assert float(row["own_loss"]) != pytest.approx(measured(stranger, x_of(own), test)[0], rel=1e-6)

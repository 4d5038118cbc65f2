"""Evaluation on every client: it measures what it says, and changes nothing."""

from __future__ import annotations

import copy
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from modules import Net, Witness, classification, measured, quiet_trainer, x_of
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, R2Score
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedProx
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback
from lightning_fed.engines import ClientError
from lightning_fed.prox import L1, Box

ACCURACY = "federated/test_accuracy"


def server(algorithm: Algorithm | None = None, **kwargs: Any) -> FederatedServer:
    settings = {"clients_per_round": 2, "local_steps": 3, "figure": False, **kwargs}
    return FederatedServer(algorithm or FedADMM(eta=1.0), **settings)


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_of(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder / "csv" / "version_0" / "clients_table.csv")


def blank(cell: str) -> bool:
    return cell in ("", "nan")


# -- modules written without knowing about us -------------------------------------------------------------------


class Median(Metric):
    """A metric that keeps everything it saw in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.values).median()


class Metrics(Net):
    """Logs torchmetrics objects, with tensor states and with list states."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.median, self.mean_loss = MulticlassAccuracy(3), Median(), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy.update(logits.detach(), y)
        self.median.update(logits.detach()[:, 0])
        self.mean_loss.update(loss.detach(), len(y))
        for name in ("accuracy", "median", "mean_loss"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return loss


class Collection(Net):
    """A MetricCollection, whose members share states in compute groups."""

    def __init__(self) -> None:
        super().__init__()
        parts: dict[str, Metric] = {"prec": MulticlassPrecision(3), "f1": MulticlassF1Score(3)}
        self.collection = MetricCollection({**parts, "acc": MulticlassAccuracy(3)}, prefix="train_")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.collection.update(logits.detach(), y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)


class SharedMetric(Net):
    """Uses one metric object in training and in validation, and logs its value at the end of epochs by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits.detach(), y)
        return nn.functional.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.accuracy.compute())
        self.accuracy.reset()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass


class Outputs(Net):
    """Lightning's own advice since 2.0: collect outputs in a list, reduce and clear it when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.outputs.append(nn.functional.cross_entropy(self(x), y, reduction="none"))

    def on_validation_epoch_end(self) -> None:
        collected = torch.cat(self.outputs)
        self.log("val_examples", float(len(collected)))
        self.log("val_loss", collected.mean())
        self.outputs.clear()


class Counting(Net):
    """Counts samples in a buffer, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += len(batch[1])
        return super().training_step(batch, batch_idx)


class Noisy(Net):
    """Draws random numbers in every step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.randn_like(x))


class HalfFrozen(Net):
    """Keeps a part in evaluation mode while it trains."""

    def on_train_epoch_start(self) -> None:
        self.net[1].eval()
        self.net[3].eval()


class Bare(pl.LightningModule):
    """No validation_step, no logging."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(Bare):
    """Manual optimisation; nothing is returned, nothing validates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        optimizer.step()


class ManualValidated(Manual):
    def validation_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


# -- evaluation changes nothing ---------------------------------------------------------------------------------


class Snapshot(FederatedCallback):
    """Everything that can be seen of a module, before and after whatever stands between two of these."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.taken.append(
            {
                "parameters": {k: v.detach().clone() for k, v in module.named_parameters()},
                "requires_grad": {k: v.requires_grad for k, v in module.named_parameters()},
                "gradients": {k: None if v.grad is None else v.grad.clone() for k, v in module.named_parameters()},
                "buffers": {k: v.clone() for k, v in module.named_buffers()},
                "training": {k: m.training for k, m in module.named_modules()},
                "metrics": {k: _states(m) for k, m in module.named_modules() if isinstance(m, Metric)},
                "outputs": len(getattr(module, "outputs", ())),
                "rng": torch.get_rng_state(),
                "grad_mode": torch.is_grad_enabled(),
            }
        )


def _states(metric: Metric) -> dict[str, Any]:
    states = {name: copy.deepcopy(getattr(metric, name)) for name in metric._defaults}
    return {**states, "updates": metric._update_count, "computed": copy.deepcopy(metric._computed)}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(norm=True, dropout=0.5),
        lambda: Metrics(),
        lambda: Collection(),
        lambda: SharedMetric(),
        lambda: HalfFrozen(norm=True, dropout=0.5),
        lambda: Outputs(),
        lambda: Counting(),
        lambda: Noisy(),
        lambda: Bare(),
        lambda: ManualValidated(),
    ],
    ids=["norm", "metrics", "collection", "shared", "frozen", "outputs", "counting", "noisy", "bare", "manual"],
)
def test_evaluation_leaves_the_module_as_it_was(make: Callable[[], pl.LightningModule], tmp_path: Path) -> None:
    before, after = Snapshot(), Snapshot()
    evaluation = ClientEvaluation(table_every_n_rounds=1, gradient_mapping=True)
    trainer = quiet_trainer(
        server(), 2, callbacks=[before, evaluation, after], logger=CSVLogger(tmp_path), limit_val_batches=0
    )
    trainer.fit(make(), datamodule=classification(drop_last=True))
    for old, new in zip(before.taken, after.taken, strict=True):
        assert [name for name in old if not same(old[name], new[name])] == []


def run(module: pl.LightningModule, every: int, rounds: int = 4, **settings: Any) -> tuple[pl.LightningModule, Any]:
    options = {name: settings.pop(name) for name in ("logger", "callbacks") if name in settings}
    trainer = quiet_trainer(server(evaluate_every=every, **settings), rounds, **options)
    trainer.fit(module, datamodule=classification(drop_last=True))
    return module, {k: v for k, v in metrics_of(trainer).items() if not k.startswith("federated/")}


@pytest.mark.parametrize("buffers", ["average", "server", "local"])
def test_iterates_do_not_depend_on_evaluation(buffers: str, tmp_path: Path) -> None:
    def final(every: int) -> dict[str, Tensor]:
        module = Net("adam", dropout=0.5, norm=True, scheduler="epoch")
        return run(module, every, buffers=buffers, logger=CSVLogger(tmp_path))[0].state_dict()

    once, thrice, never = final(1), final(3), final(0)
    assert all(torch.equal(once[name], never[name]) and torch.equal(thrice[name], never[name]) for name in never)


@pytest.mark.parametrize("module", [Net, Metrics, Collection, SharedMetric, Outputs, Noisy])
def test_what_the_module_logs_does_not_depend_on_evaluation(module: Callable[[], pl.LightningModule]) -> None:
    _, with_it = run(module(), 1)
    _, without = run(module(), 0)
    assert without, "the module logs something"
    assert with_it == without


def test_buffers_that_training_step_counts_in_do_not_depend_on_evaluation() -> None:
    with_it, _ = run(Counting(), 1, buffers="average")
    without, _ = run(Counting(), 0, buffers="average")
    assert float(with_it.seen) == float(without.seen) > 0


@pytest.mark.parametrize("gradient_mapping", [False, True])
def test_train_metrics_in_the_log_do_not_depend_on_evaluation(gradient_mapping: bool, tmp_path: Path) -> None:
    logged = []
    for callbacks in ([ClientEvaluation(gradient_mapping=gradient_mapping)], []):
        logger = CSVLogger(tmp_path, name=f"{len(callbacks)}")
        run(Metrics(), 0, logger=logger, callbacks=callbacks)
        rows = rows_of(Path(logger.log_dir) / "metrics.csv")
        logged.append([{k: row[k] for k in ("step", "accuracy", "median", "mean_loss")} for row in rows])
    assert logged[0] == logged[1]
    assert len([row for row in logged[0] if row["median"]]) == 4


@pytest.mark.parametrize("interrupted", ["server", "own"])
def test_an_exception_in_an_evaluation_leaves_the_servers_model(interrupted: str, tmp_path: Path) -> None:
    calls: list[int] = []  # not in the module, where evaluation takes it back

    class Breaks(Net):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            calls.append(batch_idx)
            if len(calls) == {"server": 2, "own": 6}[interrupted]:
                raise RuntimeError("out of paper")

    witness, module = Witness(), Breaks(norm=True)
    modes: list[bool] = []
    evaluation = ClientEvaluation(table_every_n_rounds=1)
    trainer = quiet_trainer(
        server(clients_per_round=None),
        1,
        callbacks=[witness, evaluation],
        logger=CSVLogger(tmp_path),
        limit_val_batches=0,
    )
    with pytest.raises(RuntimeError, match="out of paper"):
        trainer.fit(module, datamodule=classification(drop_last=True))
    modes += [m.training for m in module.modules()]
    assert torch.equal(x_of(module), witness.x_bar[-1])
    assert all(modes)


# -- what is measured -------------------------------------------------------------------------------------------


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


# -- when it is measured ----------------------------------------------------------------------------------------


def evaluated_rounds(folder: Path, column: str = "federated/objective") -> list[int]:
    rows = rows_of(folder / "csv" / "version_0" / "metrics.csv")
    return [int(row["step"]) for row in rows if row.get(column)]


def test_every_n_rounds_and_the_last_round_are_evaluated(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), 7, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert evaluated_rounds(tmp_path) == [2, 5, 6]
    assert evaluated_rounds(tmp_path, "federated/local_loss") == list(range(7))


def test_the_last_round_by_max_steps_is_evaluated(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), -1, max_steps=4, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert evaluated_rounds(tmp_path) == [2, 3]


class StopAfter(pl.Callback):
    """Stops as EarlyStopping and Timer do: at the end of a round, without warning."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.global_step >= self.rounds


def test_the_last_round_of_a_fit_that_stops_early_is_evaluated(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), 9, callbacks=[StopAfter(5)], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert evaluated_rounds(tmp_path, "federated/local_loss") == list(range(5))
    assert evaluated_rounds(tmp_path) == [2, 4]


def test_a_fit_that_stops_early_has_a_table_of_its_last_round(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), 9, callbacks=[StopAfter(5)], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert {int(row["step"]) for row in table_of(tmp_path)} == {4}
    assert len(table_of(tmp_path)) == 4


def test_evaluation_can_be_switched_off(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=0), 2, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert not any("objective" in name or "accuracy" in name for name in trainer.callback_metrics)
    assert "federated/primal_residual" in trainer.callback_metrics
    assert not (tmp_path / "csv" / "version_0" / "clients_table.csv").exists()


@pytest.mark.parametrize(("every", "table_every", "steps"), [(1, 2, {1, 3, 5, 6}), (2, 3, {2, 5, 6})])
def test_tables_come_every_n_rounds_and_at_the_end(
    every: int, table_every: int, steps: set[int], tmp_path: Path
) -> None:
    evaluation = ClientEvaluation(every_n_rounds=every, table_every_n_rounds=table_every)
    trainer = quiet_trainer(server(), 7, callbacks=[evaluation], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert {int(row["step"]) for row in table_of(tmp_path)} == steps


def test_the_users_own_evaluation_replaces_the_default() -> None:
    evaluation = ClientEvaluation(every_n_rounds=2)
    trainer = quiet_trainer(server(evaluate_every=1), 1, callbacks=[evaluation])
    trainer.fit(Net(), datamodule=classification())
    assert [c for c in trainer.callbacks if isinstance(c, ClientEvaluation)] == [evaluation]


def test_callbacks_can_watch_what_evaluation_logs() -> None:
    stopping = EarlyStopping("federated/objective", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    trainer = quiet_trainer(server(), 9, callbacks=[stopping])
    trainer.fit(Net(), datamodule=classification())
    assert trainer.current_epoch == 2


@pytest.mark.parametrize("name", ["every_n_rounds", "table_every_n_rounds"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_wrong_intervals_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"ClientEvaluation\.{name} must be a whole number >= 1, got {value!r}"):
        ClientEvaluation(**{name: value})


# -- whatever module and data there are -------------------------------------------------------------------------


def test_manual_optimisation_without_a_loss_is_trained_and_not_measured(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(), 2, logger=CSVLogger(tmp_path, "csv"))
    module = Manual()
    before = x_of(module)
    trainer.fit(module, datamodule=classification())
    assert not torch.equal(x_of(module), before)
    assert "federated/objective" not in trainer.callback_metrics
    assert "federated/local_loss" not in trainer.callback_metrics
    assert all(blank(row["train_loss"]) and blank(row["own_loss"]) for row in table_of(tmp_path))


def test_manual_optimisation_is_measured_by_its_validation_step() -> None:
    data, module = classification(), ManualValidated()
    trainer = quiet_trainer(server(), 2)
    trainer.fit(module, datamodule=data)
    expected = [measured(module.net, x_of(module), data.client_dataset(cid))[0] for cid in data.client_ids]
    assert metrics_of(trainer)["federated/objective"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)


def test_a_gradient_mapping_without_a_loss_is_refused_before_the_first_local_step() -> None:
    module = Manual()
    steps: list[int] = []
    module.on_before_optimizer_step = lambda optimizer: steps.append(1)  # type: ignore[method-assign]
    trainer = quiet_trainer(server(), 1, callbacks=[ClientEvaluation(gradient_mapping=True)])
    with pytest.raises(ValueError, match="gradient_mapping") as error:
        trainer.fit(module, datamodule=classification())
    assert not isinstance(error.value, ClientError)
    assert not steps


def test_a_module_without_validation_step_is_measured_by_its_training_step() -> None:
    data, module = classification(), Bare()
    trainer = quiet_trainer(server(), 2)
    trainer.fit(module, datamodule=data)
    metrics = metrics_of(trainer)
    train = [measured(module.net, x_of(module), data.client_dataset(cid))[0] for cid in data.client_ids]
    test = [measured(module.net, x_of(module), data.client_dataset(cid, "test"))[0] for cid in data.client_ids]
    assert metrics["federated/objective"] == pytest.approx(sum(train) / 4, rel=1e-6)
    assert metrics["federated/test_loss"] == pytest.approx(sum(test) / 4, rel=1e-6)
    assert ACCURACY not in metrics


def test_validation_data_are_measured_where_there_are_no_test_data() -> None:
    splits = classification().splits
    data, module = FederatedDataModule(splits["train"], val=splits["test"], batch_size=4), Net()
    trainer = quiet_trainer(server(), 1)
    trainer.fit(module, datamodule=data)
    losses = [measured(Net(), x_of(module), data.client_dataset(cid, "val"))[0] for cid in data.client_ids]
    assert metrics_of(trainer)["federated/val_loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert "federated/test_loss" not in trainer.callback_metrics


@pytest.mark.filterwarnings(
    "ignore:Total length of `list` across ranks is zero"
)  # Lightning, about nothing to validate
def test_data_without_anything_held_out_are_measured_on_training_data(tmp_path: Path) -> None:
    data, module, witness = FederatedDataModule(classification().splits["train"], batch_size=4), Net(), Witness()
    trainer = quiet_trainer(server(), 1, callbacks=[witness], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(module, datamodule=data)
    assert {name for name in trainer.callback_metrics if name.endswith("_accuracy")} == {"federated/train_accuracy"}
    for row in table_of(tmp_path):
        assert set(row) == {
            *("step", "client", "examples", "visits"),
            *("train_loss", "train_accuracy", "own_loss", "own_accuracy"),
        }
        if row["client"] in witness.x_i[-1]:
            own = measured(Net(), witness.x_i[-1][row["client"]], data.client_dataset(row["client"]))
            assert float(row["own_loss"]) == pytest.approx(own[0], rel=1e-6)


def test_a_metric_that_needs_more_samples_than_a_client_has_does_not_stop_the_fit() -> None:
    class Regression(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.r2 = R2Score()

        def training_step(self, batch: list[Tensor]) -> Tensor:  # type: ignore[override]
            x, y = batch
            predicted = self.net(x)[:, 0]
            self.r2.update(predicted.detach(), y)
            self.log("r2", self.r2, on_step=False, on_epoch=True)
            return nn.functional.mse_loss(predicted, y)

    g = torch.Generator().manual_seed(0)
    datasets = [TensorDataset(torch.randn(n, 6, generator=g), torch.randn(n, generator=g)) for n in (1, 5, 9)]
    trainer = quiet_trainer(server(clients_per_round=None), 1)
    trainer.fit(Regression(), datamodule=FederatedDataModule(datasets, batch_size=4))
    assert {"r2", "federated/objective"} <= trainer.callback_metrics.keys()


def test_clients_without_test_data_are_left_out_of_its_mean(tmp_path: Path) -> None:
    splits = classification().splits
    some = {cid: splits["test"][cid] for cid in ("c1", "c3")}
    data, module = FederatedDataModule(splits["train"], test=some, batch_size=4), Net()
    trainer = quiet_trainer(server(clients_per_round=None), 1, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(module, datamodule=data)
    losses = {cid: measured(Net(), x_of(module), dataset)[0] for cid, dataset in some.items()}
    assert metrics_of(trainer)["federated/test_loss"] == pytest.approx(sum(losses.values()) / 2, rel=1e-6)
    assert [row["client"] for row in table_of(tmp_path) if blank(row["test_loss"])] == ["c0", "c2"]


class Wrapped(Dataset[Any]):
    """Samples that have to go through a DataLoader."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def test_any_dataset_gives_the_same_numbers_as_tensors_in_memory() -> None:
    plain = classification()
    loaded = FederatedDataModule(
        {cid: Wrapped(dataset) for cid, dataset in plain.splits["train"].items()},
        test={cid: Wrapped(dataset) for cid, dataset in plain.splits["test"].items()},
        batch_size=4,
    )
    found = []
    for data in (plain, loaded):
        trainer = quiet_trainer(server(), 2)
        trainer.fit(Net(dropout=0.5), datamodule=data)
        found.append({k: v for k, v in metrics_of(trainer).items() if k != "federated/seconds"})
    assert found[0] == pytest.approx(found[1], rel=1e-6)


class Detector(pl.LightningModule):
    """As torchvision's detectors: losses in training mode, predictions in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.layer(x)
        return {"classes": torch.nn.functional.cross_entropy(logits, y)} if self.training else list(logits)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return sum(self(*batch).values())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ValidatedDetector(Detector):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.stack(self(batch[0])), batch[1])


@pytest.mark.parametrize(("kind", "measured"), [(Detector, False), (ValidatedDetector, True)])
def test_a_step_for_training_mode_only_is_evaluated_by_another_or_not_at_all(kind: Any, measured: bool) -> None:
    trainer = quiet_trainer(server(), 2, limit_val_batches=0)
    with pytest.warns(UserWarning, match=f"{kind.__name__}.training_step does not work in evaluation mode"):
        trainer.fit(kind(), datamodule=classification())
    assert trainer.global_step == 2
    assert ("federated/objective" in trainer.callback_metrics) == measured

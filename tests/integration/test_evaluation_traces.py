"""Evaluation changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.evaluated import (
    Bare,
    Collection,
    Counting,
    HalfFrozen,
    ManualValidated,
    Metrics,
    Noisy,
    Outputs,
    SharedMetric,
    metrics_of,
    rows_of,
    server,
)
from helpers.modules import Net, Witness, classification, quiet_trainer, x_of
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.callbacks import ClientEvaluation, FederatedCallback


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
    assert not witness.x_bar  # the server's model and clients' own models are evaluated before the round counts
    assert torch.equal(x_of(module), x_of(Breaks(norm=True)))
    assert all(modes)

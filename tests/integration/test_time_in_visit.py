"""Inside a visit it is the time of a plain Trainer of as many steps; everybody else goes on counting rounds."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import quiet_trainer
from helpers.reuse import alone as alone_of
from helpers.zoo.base import Entry, Manual, Tiny, vectors
from helpers.zoo.clocks import CLOCKS, Cosine, ScheduledByHand
from helpers.zoo.oracle import SEED, Epochs, plainly, state_of
from helpers.zoo.runs import Fixed
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import FederatedCallback

ROUNDS, STEPS = 3, 4
#: Not in the module: what a visit does to a module's attributes is undone.
SEEN: list[tuple[str, Any]] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def now(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "batches": trainer.num_training_batches,
        "last": trainer.is_last_batch,
        "estimated": trainer.estimated_stepping_batches,
    }


class Clock(Tiny):
    """Looks at the clock wherever a module can inside a batch."""

    def note(self, where: str, batch_idx: int | None = None) -> None:
        assert (self.current_epoch, self.global_step) == (self.trainer.current_epoch, self.trainer.global_step)
        SEEN.append((where, {**now(self.trainer), "batch": batch_idx}))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training_step", batch_idx)
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("on_before_zero_grad")


class ClockOnly(Tiny):
    """Looks at the clock in the step alone, so that steps may go without hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        SEEN.append(("training_step", {**now(self.trainer), "batch": batch_idx}))
        return self.loss(batch)


class ClockByHand(Manual, Clock):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.note("training_step", batch_idx)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.note("after the step", batch_idx)


class ClockInOptimizerStep(Clock):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        SEEN.append(("epoch of optimizer_step", epoch))
        self.note("optimizer_step", batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.note("after optimizer_step", batch_idx)


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    cohorts: Any = ((0, 1, 2),) * ROUNDS,
    data: Any = None,
    trainer: dict[str, Any] | None = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> pl.Trainer:
    if "local_epochs" not in settings:
        settings.setdefault("local_steps", STEPS)
    options = {"evaluate_every": 0, "figure": False, "engine": "sequential", **settings}
    server = FederatedServer(FedAvg(), sampler=Fixed(cohorts), seed=SEED, **options)
    made = quiet_trainer(server, **{"rounds": len(cohorts), "callbacks": list(callbacks), **(trainer or {})})
    made.fit(module, datamodule=data or vectors(), ckpt_path=ckpt_path)
    return made


def fit_alone(module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    return fit(module, *callbacks, cohorts=((0,),) * ROUNDS, data=alone_of(vectors(), "c"), **kwargs)


# -- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [(ClockByHand, 1), *((kind, n) for kind in (Clock, ClockOnly, ClockInOptimizerStep) for n in (1, 2, 3))],
)
def test_every_number_is_that_of_a_plain_trainer(kind: type[Tiny], accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    plainly(Entry("", kind, steps=STEPS, trainer=options), vectors(), "c", ROUNDS, Epochs(ROUNDS))
    expected = list(SEEN)
    assert len(expected) >= ROUNDS * STEPS
    SEEN.clear()
    fit_alone(kind(), trainer=options)
    assert expected == SEEN


def by_visit() -> list[list[dict[str, Any]]]:
    """What was seen in training_step, visit by visit."""
    visits: list[list[dict[str, Any]]] = []
    for where, seen in SEEN:
        if where == "training_step":
            if seen["batch"] == 0:
                visits.append([])
            visits[-1].append(seen)
    return visits


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Clock, ClockOnly])
def test_with_local_epochs_time_is_that_of_the_client_with_most_steps(kind: type[Tiny], accumulate: int) -> None:
    """Clients of 5, 6 and 7 samples have 2, 2 and 3 batches in an epoch."""
    fit(kind(), local_epochs=2, trainer={"accumulate_grad_batches": accumulate})
    visits = by_visit()
    assert [len(visit) for visit in visits] == [4, 4, 6] * ROUNDS
    per_round = 6 // accumulate
    for i, visit in enumerate(visits):
        k, own = i // 3, len(visit)
        for t, seen in enumerate(visit):
            assert seen == {
                "epoch": k,
                "step": k * per_round + t // accumulate,
                "batches": 6,
                "last": t == own - 1,
                "estimated": ROUNDS * per_round,
                "batch": t,
            }


def test_time_goes_on_while_a_client_is_away() -> None:
    fit(Clock(), cohorts=((0, 1), (1,), (2, 0)))
    steps = [[seen["step"] for seen in visit] for visit in by_visit()]
    assert steps == [[k * STEPS + t for t in range(STEPS)] for k in (0, 0, 1, 2, 2)]


def test_limit_train_batches_limits_time_too() -> None:
    fit(Clock(), trainer={"limit_train_batches": 2})
    for i, visit in enumerate(by_visit()):
        assert [seen["step"] for seen in visit] == [i // 3 * 2, i // 3 * 2 + 1]
        assert {(seen["batches"], seen["estimated"]) for seen in visit} == {(2, 2 * ROUNDS)}


class Estimates(Tiny):
    """Asks how long it will take, before and at the beginning."""

    def note(self, where: str) -> None:
        SEEN.append((where, self.trainer.estimated_stepping_batches))

    def setup(self, stage: str) -> None:
        self.note("setup")

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.note("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training_step")
        return self.loss(batch)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"local_steps": 4}, 4), ({"local_epochs": 2}, 6), ({"trainer": {"accumulate_grad_batches": 2}}, 2)],
    ids=["steps", "epochs", "accumulated"],
)
def test_the_estimate_is_there_before_optimisers_are_made(settings: dict[str, Any], steps: int) -> None:
    fit(Estimates(), **settings)
    seen = dict(SEEN)
    assert [seen[where] for where in ("setup", "configure_optimizers", "training_step")] == [ROUNDS * steps] * 3
    assert seen["on_train_start"] == ROUNDS


def test_max_steps_counts_rounds() -> None:
    trainer = fit(Estimates(), cohorts=((0, 1),) * 5, trainer={"rounds": 10, "max_steps": 2})
    assert trainer.global_step == trainer.current_epoch == 2
    assert len([where for where, _ in SEEN if where == "training_step"]) == 2 * 2 * STEPS
    assert dict(SEEN)["configure_optimizers"] == 2 * STEPS


# -- everybody else --------------------------------------------------------------------------------------------------

GRADIENT_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
CLIENT_HOOKS = ("on_round_start", "on_client_start", "on_client_step", "on_client_end", "on_round_end")
BEFORE = ("setup", "on_fit_start", "state_key", "state_dict", "load_state_dict")


def _noting(name: str) -> Any:
    def hook(self: Any, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        SEEN.append((name, now(trainer)))

    return hook


HOOKS = [name for name in dir(pl.Callback) if not name.startswith("_") and name not in BEFORE]
Everything: Any = type("Everything", (FederatedCallback,), {name: _noting(name) for name in [*HOOKS, *CLIENT_HOOKS]})


class Quiet(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def test_callbacks_see_rounds_and_gradient_hooks_see_steps(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    options = {"enable_checkpointing": True, "logger": CSVLogger(tmp_path), "num_sanity_val_steps": 0}
    fit(Quiet(), Everything(), checkpoints, trainer=options)
    names = {name for name, _ in SEEN}
    assert names >= {*GRADIENT_HOOKS, *CLIENT_HOOKS, "on_train_batch_start", "on_train_batch_end", "on_save_checkpoint"}
    assert names >= {
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_batch_end",
        "on_train_end",
        "teardown",
    }
    for name, seen in SEEN:
        if name in GRADIENT_HOOKS:
            assert (seen["batches"], seen["estimated"]) == (STEPS, ROUNDS * STEPS), name
            assert seen["step"] // STEPS == seen["epoch"], name
        else:
            assert (seen["batches"], seen["estimated"]) == (1, ROUNDS), name
            assert seen["step"] in {seen["epoch"], seen["epoch"] + 1}, name
    for name, late in {
        "on_train_epoch_start": 0,
        "on_client_step": 0,
        "on_round_end": 1,
        "on_train_epoch_end": 1,
    }.items():
        each = [seen for where, seen in SEEN if where == name]
        assert {(seen["epoch"], seen["step"]) for seen in each} == {(k, k + late) for k in range(ROUNDS)}, name
    steps = [seen["step"] for name, seen in SEEN if name == "on_before_optimizer_step"]
    assert steps == [k * STEPS + t for k in range(ROUNDS) for _ in range(3) for t in range(STEPS)]


@pytest.mark.parametrize("by", [{"every_n_epochs": 1}, {"every_n_train_steps": 1}], ids=["epochs", "steps"])
def test_checkpoints_are_named_by_rounds(by: dict[str, int], tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, **by)
    fit(Cosine(), checkpoints, trainer={"enable_checkpointing": True})
    names = sorted(path.name for path in tmp_path.glob("epoch*.ckpt"))
    assert names == [f"epoch={k}-step={k + 1}.ckpt" for k in range(ROUNDS)]
    for k, name in enumerate(names):
        saved = torch.load(tmp_path / name, weights_only=False)
        assert (saved["epoch"], saved["global_step"]) == (k, k + 1)
        assert saved["lr_schedulers"][0]["last_epoch"] == (k + 1) * STEPS


class Saves(Cosine):
    """Saves from inside a step, in every visit."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            before = now(self.trainer)
            self.trainer.save_checkpoint(f"{self.current_epoch}.ckpt")
            assert now(self.trainer) == before
            SEEN.append(("training_step", {**before, "batch": batch_idx}))
        return self.loss(batch)


def test_what_a_step_saves_counts_rounds() -> None:
    fit(Saves())
    assert [seen["step"] for _, seen in SEEN] == [k * STEPS + 2 for k in range(ROUNDS) for _ in range(3)]
    for k in range(ROUNDS):
        saved = torch.load(f"{k}.ckpt", weights_only=False)
        assert (saved["epoch"], saved["global_step"]) == (k, k)
        assert saved["lr_schedulers"][0]["last_epoch"] == k * STEPS


@pytest.mark.parametrize("interval", ["step", "epoch", None])
def test_the_monitor_logs_the_servers_rate_once_a_round(interval: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = fit(
        Cosine(), LearningRateMonitor(logging_interval=interval), trainer={"logger": logger, "log_every_n_steps": 1}
    )
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("lr-SGD")]
    scale = trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0]
    assert [int(row["step"]) for row in rows] == list(range(ROUNDS))
    assert [float(row["lr-SGD"]) for row in rows] == pytest.approx([0.3 * scale(k * STEPS) for k in range(ROUNDS)])


# -- learning rates --------------------------------------------------------------------------------------------------


class Rates(FederatedCallback):
    """The learning rate of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


class PlainRates(Rates, Epochs):
    def __init__(self) -> None:
        Epochs.__init__(self, ROUNDS)
        Rates.__init__(self)


@pytest.mark.parametrize("entry", CLOCKS, ids=lambda entry: entry.name)
def test_a_lone_client_has_the_rates_of_a_plain_trainer(entry: Entry) -> None:
    plain, rates = PlainRates(), Rates()
    plainly(entry, vectors(), "c", ROUNDS, plain)
    fit_alone(entry.make(), rates, local_steps=entry.steps, trainer=dict(entry.trainer))
    assert len(plain.seen) >= ROUNDS
    assert rates.seen == plain.seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_everybody_in_a_round_has_the_servers_rates(accumulate: int) -> None:
    """Also those who stop early: the server's scheduler goes on by as many steps as anybody may make."""
    rates = Rates()
    trainer = fit(Cosine(), rates, local_epochs=2, trainer={"accumulate_grad_batches": accumulate})
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    scale, most = scheduler.lr_lambdas[0], 6 // accumulate
    steps = [k * most + t for k in range(ROUNDS) for own in (4, 4, 6) for t in range(own // accumulate)]
    assert rates.seen == pytest.approx([0.3 * scale(step) for step in steps], rel=1e-12)
    assert scheduler.last_epoch == ROUNDS * most
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3 * scale(ROUNDS * most), abs=1e-15)


@pytest.mark.parametrize("workers", [1, 2])
def test_schedulers_may_restart_in_every_visit(workers: int) -> None:
    rates = Rates()
    callbacks = [rates] if workers == 1 else []
    trainer = fit(Cosine(), *callbacks, restart_schedulers=True, workers=workers)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    scale = scheduler.lr_lambdas[0]
    if workers == 1:
        assert rates.seen == pytest.approx([0.3 * scale(t) for t in range(STEPS)] * 3 * ROUNDS, rel=1e-12)
    assert scheduler.last_epoch == 0
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.3 * scale(0)


def test_schedulers_by_epoch_do_not_restart() -> None:
    class Both(Cosine):
        interval = "epoch"

        def scheduler(self, optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    rates = Rates()
    fit(Both(), rates, restart_schedulers=True)
    assert rates.seen == [0.3 * 0.5**k for k in range(ROUNDS) for _ in range(3 * STEPS)]


def test_a_round_that_fails_does_not_move_the_scheduler() -> None:
    class Fails(Cosine):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == 2:
                raise RuntimeError("no more")
            return self.loss(batch)

    made: list[pl.Trainer] = []

    class Keep(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            made.append(trainer)

    with pytest.raises(RuntimeError, match="no more"):
        fit(Fails(), Keep())
    assert made[0].lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    assert made[0].global_step == 1


# -- resume ----------------------------------------------------------------------------------------------------------


class Resumable(Saves):
    """Whose loss depends on the time as well."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) * (1 + self.trainer.global_step / 10)


without_the_checkpoints = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@without_the_checkpoints
@pytest.mark.parametrize("settings", [{}, {"restart_schedulers": True}, {"local_epochs": 2}], ids=repr)
def test_a_run_with_a_scheduler_by_step_is_resumed_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, rates = Resumable(), Rates()
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(whole, checkpoints, rates, trainer={"enable_checkpointing": True}, **settings)
    middle = Path("1.ckpt").rename(tmp_path / "middle.ckpt")
    for path in (tmp_path / "epoch=0.ckpt", middle):  # after a round; and in the middle of a visit of the next one
        resumed, again = Resumable(), Rates()
        trainer = fit(resumed, again, ckpt_path=path, **settings)
        state = state_of(resumed)
        assert [name for name, tensor in state_of(whole).items() if not torch.equal(tensor, state[name])] == []
        assert again.seen == rates.seen[len(rates.seen) // ROUNDS :]
        assert trainer.global_step == ROUNDS


@without_the_checkpoints
def test_manual_schedulers_are_resumed_too(tmp_path: Path) -> None:
    whole, resumed = ScheduledByHand(), ScheduledByHand()
    fit(whole, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), trainer={"enable_checkpointing": True})
    fit(resumed, ckpt_path=tmp_path / "epoch=0.ckpt")
    state = state_of(resumed)
    assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(whole).items())

"""What a Lightning user knows works at the level of rounds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.drawn import batches
from helpers.modules import Net, classification, quiet_trainer, x_of
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, Timer
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.callbacks import FederatedCallback


def server(**kwargs: Any) -> FederatedServer:
    algorithm = kwargs.pop("algorithm", FedADMM(eta=1.0))
    return FederatedServer(algorithm, **{"clients_per_round": 2, "local_steps": 3, **kwargs})


class Calls(pl.Callback):
    """Counts hooks; remembers where validation saw the counters."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.validated_after: list[int] = []

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_train_epoch_start(self, *_: Any) -> None:
        self._count("epoch")

    def on_train_batch_start(self, *_: Any) -> None:
        self._count("batch")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._count("step")

    def on_sanity_check_start(self, *_: Any) -> None:
        self._count("sanity")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_after.append(trainer.global_step)


def test_early_stopping_counts_rounds() -> None:
    trainer = quiet_trainer(server(), 50, callbacks=[EarlyStopping("val_loss", patience=2, min_delta=100.0)])
    trainer.fit(Net(), datamodule=classification(val=0.2))
    assert trainer.global_step == trainer.current_epoch == 3


def test_early_stopping_can_watch_the_objective() -> None:
    stop = EarlyStopping("federated/objective", patience=1, min_delta=100.0)
    trainer = quiet_trainer(server(), 50, callbacks=[stop])
    trainer.fit(Net(), datamodule=classification())
    assert trainer.global_step == 2


def test_max_time_ends_after_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, stage="train": 3601.0 if trainer.global_step == 1 else 0.0)
    trainer = quiet_trainer(server(), 5, max_time={"hours": 1})
    trainer.fit(Net(), datamodule=classification())
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"check_val_every_n_epoch": 2}, [2, 4]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3]),
        ({"val_check_interval": 0.5}, [1, 2, 3, 4]),
        ({"limit_val_batches": 0}, []),
    ],
    ids=str,
)
def test_validation_runs_after_the_rounds_it_is_asked_for(options: dict[str, Any], expected: list[int]) -> None:
    calls = Calls()
    quiet_trainer(server(), 4, callbacks=[calls], **options).fit(Net(), datamodule=classification())
    assert calls.validated_after == expected


def test_hooks_fire_once_per_round_and_gradient_hooks_once_per_local_step() -> None:
    calls = Calls()
    quiet_trainer(server(), 4, callbacks=[calls]).fit(Net(), datamodule=classification())
    assert calls.counts == {"sanity": 1, "epoch": 4, "batch": 4, "step": 4 * 2 * 3}


def test_module_hooks_fire_once_per_local_batch() -> None:
    class Counting(Net):
        seen: list[tuple[str, int]] = []  # noqa: RUF012

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(("start", batch_idx))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["loss"].isfinite()
            self.seen.append(("end", batch_idx))

    module = Counting()
    quiet_trainer(server(local_steps=4), 1).fit(module, datamodule=classification())
    one_visit = [(what, i) for i in range(4) for what in ("start", "end")]
    assert module.seen == one_visit * 2


def test_validate_test_and_predict_use_the_servers_model() -> None:
    trainer, data, module = quiet_trainer(server(), 2), classification(), Net()
    trainer.fit(module, datamodule=data)
    x, y = map(torch.cat, zip(*(data.client_dataset(cid, "test").tensors for cid in data.client_ids), strict=True))
    with torch.no_grad():
        logits = module(x)
    expected = float(torch.nn.functional.cross_entropy(logits, y))
    assert trainer.validate(module, data, verbose=False)[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.test(module, data, verbose=False)[0]["test_loss"] == pytest.approx(expected, rel=1e-5)
    predicted = trainer.predict(module, data.test_dataloader())
    assert torch.equal(torch.cat(predicted), logits.argmax(1))


def test_self_log_in_training_gives_the_sample_weighted_mean_of_the_rounds_clients() -> None:
    seen: list[tuple[float, int]] = []

    class Watched(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("both", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]))
            if self.training:
                seen.append((float(loss.detach()), len(batch[1])))
            return loss

    trainer = quiet_trainer(server(local_steps=None, local_epochs=1), 1)
    trainer.fit(Watched(), datamodule=classification())
    mean = sum(loss * size for loss, size in seen) / sum(size for _, size in seen)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(mean, rel=1e-6)
    assert float(trainer.callback_metrics["both_epoch"]) == pytest.approx(mean, rel=1e-6)
    assert float(trainer.callback_metrics["federated/local_loss"]) == pytest.approx(mean, rel=0.2)


def test_fast_dev_run_is_one_round_of_two_clients_with_one_batch_each() -> None:
    calls = Calls()
    trainer = quiet_trainer(server(clients_per_round=4), 5, callbacks=[calls], fast_dev_run=True)
    trainer.fit(Net(), datamodule=classification())
    assert calls.counts["epoch"] == 1
    assert calls.counts["step"] == 2


@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (0.5, 4), (1.0, 8)])
def test_limit_train_batches_limits_a_visit(limit: Any, steps: int) -> None:
    calls = Calls()
    trainer = quiet_trainer(server(local_steps=8), 1, callbacks=[calls], limit_train_batches=limit)
    trainer.fit(Net(), datamodule=classification())
    assert calls.counts["step"] == 2 * steps


def test_no_training_batches_means_no_rounds() -> None:
    module, before = Net(), x_of(Net())
    quiet_trainer(server(), 2, limit_train_batches=0).fit(module, datamodule=classification())
    assert torch.equal(x_of(module), before)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfit_batches_repeats_the_first_batches_of_each_client() -> None:
    seen: list[Tensor] = []

    class Watched(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.training:
                seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    data = classification(clients=1)
    trainer = quiet_trainer(server(clients_per_round=1, local_steps=4), 1, overfit_batches=2, limit_val_batches=0)
    trainer.fit(Watched(), datamodule=data)
    x = data.client_dataset("c0").tensors[0]
    assert [bool(torch.equal(batch, x[4 * i : 4 * i + 4])) for i, batch in zip([0, 1, 0, 1], seen, strict=True)]
    assert torch.equal(seen[0], x[:4])
    assert torch.equal(seen[3], x[4:8])


def test_max_steps_counts_rounds() -> None:
    trainer = quiet_trainer(server(), -1, max_steps=3)
    trainer.fit(Net(), datamodule=classification())
    assert (trainer.global_step, trainer.current_epoch) == (3, 3)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_barebones_trainer_runs_rounds() -> None:
    module, fed = Net(), server()
    pl.Trainer(max_epochs=2, accelerator="cpu", barebones=True, callbacks=[fed]).fit(
        module, datamodule=classification()
    )
    assert fed.rounds_done == 2


def test_a_second_fit_goes_on_with_the_state_of_the_first() -> None:
    def run(*limits: int) -> tuple[Tensor, int]:
        fed, module = server(), Net()
        trainer = quiet_trainer(fed, limits[0])
        for limit in limits:
            trainer.fit_loop.max_epochs = limit
            trainer.fit(module, datamodule=classification())
        return x_of(module), fed.rounds_done

    (halves, done), (whole, _) = run(2, 4), run(4)
    assert done == 4
    assert torch.equal(halves, whole)


@pytest.mark.parametrize(("other", "named"), [("module", "module"), ("clients", "set of clients")])
def test_a_second_fit_of_another_federation_is_refused(other: str, named: str) -> None:
    module, trainer = Net(), quiet_trainer(server(), 2)
    trainer.fit(module, datamodule=classification())
    trainer.fit_loop.max_epochs = 4
    with pytest.raises(ValueError, match=f"already run 2 rounds with another {named}"):
        trainer.fit(Net() if other == "module" else module, datamodule=classification(5 if other == "clients" else 4))


def test_a_server_in_a_new_trainer_starts_anew() -> None:
    fed = server()
    results = []
    for _ in range(2):
        module = Net()
        quiet_trainer(fed, 2).fit(module, datamodule=classification())
        results.append(x_of(module))
    assert torch.equal(*results)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def run(seed: int, before: int) -> Tensor:
        torch.manual_seed(before)  # what happened before the fit must not matter
        module = Net(dropout=0.5)
        quiet_trainer(server(seed=seed), 2).fit(module, datamodule=classification())
        return x_of(module)

    assert torch.equal(run(1, before=1), run(1, before=2))
    assert not torch.equal(run(1, before=1), run(2, before=1))


def test_seed_everything_seeds_the_federation() -> None:
    def run(seed: int) -> Tensor:
        pl.seed_everything(seed, verbose=False)
        module = Net()
        quiet_trainer(server(), 2).fit(module, datamodule=classification())
        return x_of(module)

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))


@pytest.mark.parametrize(
    ("interval", "restart", "rates"),
    [
        ("epoch", False, [0.05, 0.045, 0.0405]),
        ("step", True, [0.05, 0.05, 0.05]),
        ("step", False, [0.05, 0.05 * 0.9**3, 0.05 * 0.9**6]),
    ],
)
def test_schedulers_step_per_round_or_per_local_step(interval: str, restart: bool, rates: list[float]) -> None:
    at_round_start, at_visit_end = [], []

    class Watch(FederatedCallback):
        def on_round_start(self, trainer: pl.Trainer, *_: Any) -> None:
            at_round_start.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_client_end(self, trainer: pl.Trainer, *_: Any) -> None:
            at_visit_end.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = quiet_trainer(server(restart_schedulers=restart), 3, callbacks=[Watch()])
    trainer.fit(Net(scheduler=interval), datamodule=classification())
    assert at_round_start == pytest.approx(rates)
    decay = 0.9**3 if interval == "step" else 1.0
    assert at_visit_end == pytest.approx([rate * decay for rate in itertools.chain(*zip(rates, rates, strict=True))])


def test_learning_rate_monitor_and_loggers_count_rounds(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(server(), 3, callbacks=[LearningRateMonitor("epoch")], logger=logger)
    trainer.fit(Net(scheduler="epoch"), datamodule=classification())
    rows = [row for row in logger.experiment.metrics if "train_loss" in row] if logger.experiment.metrics else []
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    header = text[0].split(",")
    column = {name: i for i, name in enumerate(header)}
    cells = [line.split(",") for line in text[1:]]
    train = [(int(c[column["step"]]), int(c[column["epoch"]])) for c in cells if c[column["train_loss"]]]
    assert train == [(0, 0), (1, 1), (2, 2)]
    assert not rows
    rates = [float(c[column["lr-SGD"]]) for c in cells if c[column["lr-SGD"]]]
    assert rates == pytest.approx([0.05, 0.045, 0.0405])


def test_bf16_trains_and_stays_near_float32() -> None:
    def run(precision: str) -> Tensor:
        module = Net()
        quiet_trainer(server(), 2, precision=precision).fit(module, datamodule=classification())
        return x_of(module).float()

    exact = run("32-true")
    for precision in ("bf16-mixed", "bf16-true"):
        got = run(precision)
        assert 0 < float((got - exact).abs().max()) < 0.05, precision


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_one_client_of_fedavg_is_plain_training() -> None:
    """One client, one local epoch per round, the same batches: Lightning's own loop gives the same weights."""
    data = classification(clients=1)

    class Same(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            epoch = self.trainer.current_epoch
            return DataLoader(list(batches(data, "c0", 0, epoch)), batch_size=None)

    def run(*callbacks: pl.Callback, datamodule: Any) -> Tensor:
        module = Net()
        options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "reload_dataloaders_every_n_epochs": 1}
        trainer = quiet_trainer(None, 3, callbacks=list(callbacks), limit_val_batches=0, **options)
        trainer.fit(module, datamodule=datamodule)
        return x_of(module)

    fed = FederatedServer(FedAvg(), local_epochs=1, seed=0)
    assert torch.allclose(run(fed, datamodule=data), run(datamodule=Same()), atol=1e-7, rtol=0)

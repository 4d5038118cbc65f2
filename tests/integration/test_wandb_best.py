"""The best value of each metric in the summary of a W&B run, where it is known which side is better."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytorch_lightning as pl
import wandb
from helpers.modules import Net, classification, quiet_trainer
from helpers.wandb_reader import OfflineRun, read_run, wandb_at
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.tracking import AutoWandbLogger

ROUNDS = 4


class Scored(Net):
    """Logs three metrics that go up and down: of a known name, of a name that only the user knows, and of neither."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        turn = float(self.trainer.current_epoch % 3)
        self.log_dict({"val_recall": turn, "val_score": turn, "val_mystery": turn}, batch_size=len(batch[1]))


@dataclass
class Tracked:
    """A fit and a test by the same trainer, and what W&B recorded of them."""

    trainer: pl.Trainer
    run: OfflineRun


def track(home: Path, logger: WandbLogger) -> Tracked:
    evaluation = ClientEvaluation(higher_is_better={"score": True})
    server = FederatedServer(FedADMM(), figure=False)
    trainer = quiet_trainer(server, ROUNDS, logger=logger, callbacks=[evaluation])
    trainer.fit(Scored(lr=0.5), datamodule=classification(3))
    trainer.test(Scored(), datamodule=classification(3), verbose=False)
    wandb.finish()
    return Tracked(trainer, read_run(home))  # which refuses a second run


@pytest.fixture(scope="module", params=["auto", "stock"])
def tracked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    home = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        wandb_at(patch, home)
        stock = {"project": "test", "save_dir": str(home), "offline": True, "prefix": "trial"}
        logger = AutoWandbLogger("test", str(home)) if request.param == "auto" else WandbLogger(**stock)
        yield track(home, logger)


def values(tracked: Tracked, name: str) -> list[float]:
    """What was logged under a name; the stock logger puts a prefix before it."""
    return list(tracked.run.series(key(tracked, name)).values())


def key(tracked: Tracked, name: str) -> str:
    return name if isinstance(tracked.trainer.logger, AutoWandbLogger) else f"trial-{name}"


def test_the_summary_has_the_best_value_of_each_metric_whose_better_side_is_known(tracked: Tracked) -> None:
    better = {
        **dict.fromkeys(["federated/objective", "federated/test_loss", "federated/local_loss", "val_loss"], "min"),
        **dict.fromkeys(["federated/test_loss_worst", "federated/test_loss_worst_decile", "train_loss"], "min"),
        **dict.fromkeys(["federated/test_accuracy", "federated/test_accuracy_worst", "val_acc", "val_recall"], "max"),
        **dict.fromkeys(["federated/test_recall", "federated/test_score", "val_score"], "max"),  # score by the user
        "test_loss": "min",
        "test_acc": "max",
    }
    found = {name: tracked.run.summary[key(tracked, name)] for name in better}
    for name, best in better.items():
        logged = values(tracked, name)
        expected = {"last": logged[-1], best: {"min": min, "max": max}[best](logged)}
        assert found[name] == pytest.approx(expected), name
    earlier = {name for name, best in better.items() if found[name]["last"] != found[name][best]}
    assert {"val_recall", "val_score", "federated/test_score"} <= earlier, "the test wants a best before the last"


def test_a_metric_whose_better_side_is_unknown_has_no_best(tracked: Tracked) -> None:
    unknown = ["val_mystery", "federated/test_mystery", "federated/test_accuracy_sd", "federated/bytes_up"]
    for name in [*unknown, "federated/test_score_sd"]:
        assert tracked.run.summary[key(tracked, name)] == values(tracked, name)[-1], name


def test_the_step_of_metrics_with_a_best_is_the_round(tracked: Tracked) -> None:
    assert tracked.run.series(key(tracked, "federated/objective")).keys() == set(range(ROUNDS))


def test_a_test_after_the_fit_is_in_the_same_run(tracked: Tracked) -> None:
    assert tracked.run.series(key(tracked, "test_loss")).keys() == {ROUNDS}
    assert tracked.run.id == tracked.trainer.logger.version


def test_best_values_go_to_other_processes_without_the_run(tracked: Tracked) -> None:
    best = pickle.loads(pickle.dumps(tracked.trainer.logger.best_values))
    assert vars(best)["_run"] is None


def test_a_plain_trainer_has_best_values_with_the_automatic_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_at(monkeypatch, tmp_path)
    trainer = quiet_trainer(None, 2, logger=AutoWandbLogger("test", str(tmp_path)), log_every_n_steps=1)
    trainer.fit(Net(), datamodule=classification(3))
    wandb.finish()
    assert set(read_run(tmp_path).summary["val_acc"]) == {"last", "max"}

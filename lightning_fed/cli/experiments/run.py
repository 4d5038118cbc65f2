"""One run of an experiment: an algorithm, a seed, a folder; it can be resumed."""

from __future__ import annotations

import csv
import itertools
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import wandb

from lightning_fed.algorithms import Algorithm
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback, FinalFigure
from lightning_fed.cli.experiments.settings import Dtype, Setting
from lightning_fed.core.algorithm import hyper_parameters
from lightning_fed.core.messages import Reply
from lightning_fed.engines import DivergenceError
from lightning_fed.lightning import ModelCheckpoint, pl
from lightning_fed.server import FederatedServer
from lightning_fed.tracking.wandb import AutoWandbLogger
from lightning_fed.trainer.hooks import Visit

CLIENTS_PER_ROUND = 10

#: Rounds after which the model is kept, to compare the iterates of two algorithms.
MARKS = (1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100)

Row = dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """Settings that all runs of an experiment share and that decide their results.

    Args:
        rounds: number of rounds.
        local_steps: number of local steps of a visit.
        dtype: of the model and the data.
        evaluate_every: rounds between evaluations; the last round is evaluated too.
        evaluate_also: further rounds to evaluate, such as the first few.
    """

    rounds: int = 100
    local_steps: int = 300
    dtype: Dtype = "float64"
    evaluate_every: int = 1
    evaluate_also: tuple[int, ...] = ()


@dataclass(frozen=True)
class Execution:
    """How a run uses the machine.

    Args:
        threads: number of torch's threads; None leaves it unchanged.
        workers: number of processes that share the clients of a round.
        compile: whether to compile local steps, as in ``FederatedServer``.
        keep_checkpoint: whether to keep the checkpoint after the last round, so that the run can be extended.
    """

    threads: int | None = None
    workers: int = 1
    compile: bool | Literal["auto"] = "auto"
    keep_checkpoint: bool = False


@dataclass(frozen=True)
class Run:
    """An algorithm on a setting, with one seed; every round takes all clients if the algorithm needs them.

    Args:
        label: name of the algorithm, in folders and figures.
        out: parent of the run's folder.
        experiment: name of the experiment, for W&B.
    """

    setting: Setting
    label: str
    algorithm: Algorithm  # type: ignore[type-arg]
    seed: int
    out: Path
    recipe: Recipe = Recipe()
    execution: Execution = Execution()
    experiment: str = "reproduce"

    @property
    def rounds(self) -> int:
        return self.recipe.rounds

    @property
    def cohort(self) -> int | None:
        """Clients per round; None for all."""
        return None if self.algorithm.traits.everybody else CLIENTS_PER_ROUND

    @property
    def folder(self) -> Path:
        return self.out / self.setting.name / self.label.replace(":", "_") / f"seed_{self.seed}"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "last.ckpt"

    def history(self) -> list[Row]:
        """Metrics by round so far, of at most ``rounds`` rounds."""
        path = self.folder / "rounds.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            rows = itertools.islice(csv.DictReader(file), self.rounds)
            return [{name: float(v) for name, v in row.items() if v} for row in rows]

    @property
    def done(self) -> bool:
        return self.diverged is not None or len(self.history()) >= self.rounds

    @property
    def diverged(self) -> str | None:
        """Where and how the run diverged, or None; metrics end before that round."""
        return self.facts().get("diverged")

    def resumes_at(self) -> int:
        """Number of rounds that the checkpoint holds."""
        if not self.checkpoint.exists():
            return 0
        try:
            loaded = torch.load(self.checkpoint, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{self.checkpoint} holds objects other than tensors and plain values, which could run code when they"
                " are loaded. It is not a checkpoint of this command: delete it to start this run from its beginning."
            ) from error
        return int(loaded["epoch"])

    def x_bar(self, round: int) -> np.ndarray[Any, np.dtype[Any]] | None:
        """The server's model after ``round`` rounds, if it was kept."""
        path = self._x_bar_path(round)
        return np.load(path) if path.exists() else None

    def facts(self) -> dict[str, Any]:
        """Settings of the run, and the description of its data."""
        path = self.folder / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def go(self, tick: Callable[[float], None] = lambda rounds: None) -> None:
        """Run the missing rounds, or until divergence; ``tick`` gets fractions of rounds as they pass."""
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.execution.threads is not None:
            torch.set_num_threads(self.execution.threads)
        pl.seed_everything(self.seed, verbose=False)
        data = self.setting.data(self.seed, self.recipe.dtype)
        data.prepare_data()
        data.setup("fit")
        facts = {**self._settings(), "data": data.description or self.setting.name}
        self._write_facts(facts)
        trainer = self._trainer(tick)
        try:
            trainer.fit(
                self.setting.model(), datamodule=data, ckpt_path=self.checkpoint if self.checkpoint.exists() else None
            )
        except DivergenceError as error:
            self._write_facts({**facts, "diverged": str(error)})
        finally:
            wandb.finish()
        if self.execution.keep_checkpoint and not self.diverged:
            trainer.save_checkpoint(self.checkpoint)
        else:
            trainer.strategy.remove_checkpoint(self.checkpoint)  # with the records of clients beside it

    def _trainer(self, tick: Callable[[float], None]) -> pl.Trainer:
        recipe, execution = self.recipe, self.execution
        figure = FinalFigure(self.folder / "figure.png", title=f"{self.label} on {self.setting.name}")
        return pl.Trainer(
            max_epochs=recipe.rounds,
            precision="64-true" if recipe.dtype == "float64" else "32-true",
            accelerator="cpu",
            logger=self._logger(),
            callbacks=[
                FederatedServer(
                    self.algorithm,
                    clients_per_round=self.cohort,
                    local_steps=recipe.local_steps,
                    seed=self.seed,
                    compile=execution.compile,
                    workers=execution.workers,
                ),
                ClientEvaluation(recipe.evaluate_every, 10 * recipe.evaluate_every, also_after=recipe.evaluate_also),
                figure,
                Recorder(self, figure, tick),
                ModelCheckpoint(
                    self.folder,
                    filename="last",
                    train_time_interval=timedelta(minutes=5),
                    save_on_exception=True,
                    enable_version_counter=False,
                ),
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,  # the federated evaluation reads the test data already
            default_root_dir=self.folder,
        )

    def record(self, history: list[Row], x_bar: np.ndarray[Any, np.dtype[Any]] | None) -> None:
        """Write the metrics so far in one atomic step, and the model if it is given."""
        if x_bar is not None:
            self._x_bar_path(len(history)).parent.mkdir(exist_ok=True)
            np.save(self._x_bar_path(len(history)), x_bar)
        names = list(dict.fromkeys(name for row in history for name in row))
        path = self.folder / "rounds.csv"
        with path.with_suffix(".tmp").open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(history)
        os.replace(path.with_suffix(".tmp"), path)

    def _x_bar_path(self, round: int) -> Path:
        return self.folder / "x_bar" / f"round_{round:04d}.npy"

    def _settings(self) -> dict[str, Any]:
        return {
            "setting": self.setting.name,
            "algorithm": hyper_parameters(self.algorithm),
            "seed": self.seed,
            "local_steps": self.recipe.local_steps,
            "dtype": self.recipe.dtype,
        }

    def check(self) -> None:
        """Refuse a folder that holds a run with other settings."""
        wanted = json.loads(json.dumps(self._settings(), default=str))
        for name, before in self.facts().items():
            if name in wanted and wanted[name] != before:
                raise ValueError(
                    f"{self.folder} holds a run with {name} {before!r}, now it is {wanted[name]!r}. Give another --out,"
                    " or delete that folder."
                )

    def _write_facts(self, facts: dict[str, Any]) -> None:
        (self.folder / "run.json").write_text(json.dumps(facts, indent=1, default=str))

    def _logger(self) -> AutoWandbLogger:
        """A run of W&B in the group of all seeds, over which W&B then draws means."""
        group = f"{self.setting.name} {self.label}"
        facts = {"setting": self.setting.name, "label": self.label, "seed": self.seed}
        return AutoWandbLogger(
            name=f"{group} seed {self.seed}",
            group=f"{self.experiment} {group}",
            job_type=self.experiment,
            config={"experiment": {"name": self.experiment, **facts}},
            save_dir=str(self.folder),
        )


class Recorder(FederatedCallback):
    """Writes metrics after every round, keeps some models, and reports progress."""

    def __init__(self, run: Run, figure: FinalFigure, tick: Callable[[float], None]) -> None:
        self.run, self.figure, self.tick = run, figure, tick

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit, reply: Reply[Any, Any]
    ) -> None:
        self.tick(1 / (visit.cohort * self.run.algorithm.traits.exchanges))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = len(self.figure.history)
        keep = done in MARKS or done == self.run.rounds
        x_bar = trainer.fit_loop.server.federation.server.x_bar.numpy(force=True) if keep else None
        self.run.record(self.figure.history, x_bar)

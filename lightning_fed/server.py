"""The one callback that turns ``Trainer.fit`` into a federation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_fed.callbacks.captions import short
from lightning_fed.callbacks.defaults import add_figure, equip
from lightning_fed.core.algorithm import Algorithm, hyper_parameters
from lightning_fed.core.failures import FailurePolicy, OnError, Retry, as_policy, check_policy
from lightning_fed.core.federation import Federation, warn_if_changed
from lightning_fed.core.layout import buffers_of, parameters_of
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.core.personal import Personal
from lightning_fed.core.randomness import derive_seed
from lightning_fed.core.records import num_bytes
from lightning_fed.core.server_part import RECORDS, RUNS
from lightning_fed.core.table import Table
from lightning_fed.core.validation import is_whole, one_of, whole
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.engines.player import Buffers, RoundPlayer, RoundSettings
from lightning_fed.engines.reported import reported_round
from lightning_fed.engines.selection import Choice
from lightning_fed.engines.turnover import Turnover
from lightning_fed.evaluation.client_rows import Measured, client_rows
from lightning_fed.evaluation.evaluate import evaluate_outside_fit
from lightning_fed.evaluation.personal import federation_of
from lightning_fed.lightning import SIGTERMException, pl, rank_zero_info, results_of, set_linker, validation_metrics_of
from lightning_fed.local.client_loop import ClientLoop
from lightning_fed.local.schedule import planned_batches
from lightning_fed.local.server_snapshot import Workspace
from lightning_fed.local.step_sizes import StepSizePlan
from lightning_fed.sampling import Full, Sampler, Uniform
from lightning_fed.store import DiskStore
from lightning_fed.theory.tolerance import Tolerance, as_tolerance
from lightning_fed.tracking.best import keep_best
from lightning_fed.tracking.runs import runs_of, tell_of_new_runs
from lightning_fed.tracking.uploads import upload_server_only
from lightning_fed.trainer.agreement import check_federation, check_optimizers_alike
from lightning_fed.trainer.checkpoint_io import FederatedCheckpointIO, link_last
from lightning_fed.trainer.checks import check_optimizers, check_packages, check_resumed, check_setup, check_tolerance
from lightning_fed.trainer.client_memory import ClientMemory, Need, StoreName
from lightning_fed.trainer.history import History
from lightning_fed.trainer.hooks import FederatedCallback, RoundReport, notify
from lightning_fed.trainer.loops import ENDED, IDLE, TRAINED, VALIDATED, FederatedFitLoop, log_numbers, weigh_by_samples
from lightning_fed.trainer.model_choice import ModelChoice, check_monitored
from lightning_fed.trainer.module_state import ModuleState, is_renormed, restore_state
from lightning_fed.trainer.signals import STATUS, check_sigterm
from lightning_fed.trainer.strategy import adopt, register

register()

EngineName = Literal["auto", "sequential", "vectorized"]


class FederatedServer(FederatedCallback):
    """Makes every epoch of a stock ``Trainer`` a round of a federated algorithm.

    ``max_epochs``, ``trainer.global_step`` and the loggers' step count rounds. Between rounds the module holds the
    server's model, also for validation, in checkpoints and after the fit.

    Args:
        algorithm: for instance ``FedADMM(eta=1.0)``.
        clients_per_round: size of the cohort, drawn uniformly; all clients by default.
        sampler: any other law of the cohort, instead of ``clients_per_round``.
        local_steps: batches per visit, cycling over reshuffled epochs.
        local_epochs: epochs per visit, instead of ``local_steps``; 1 if neither is given.
        local_tolerance: stop a visit when the gradient of the local problem over all the client's data, measured before
            the visit and after each of its epochs, is small enough; a number or a
            :class:`~lightning_fed.theory.Tolerance`. ``local_steps`` or ``local_epochs`` then limit the visit.
        seed: seed of cohorts, batches and everything random in training; by default that of ``seed_everything``, or 0.
        buffers: treatment of buffers such as BatchNorm statistics: ``average`` over the cohort, keep those of the
            ``server``, or every client keeps its own (``local``).
        evaluate_every: rounds between evaluations of the objective on all clients; 0 for never.
        figure: draw loss and accuracy by round at the end, for the loggers.
        engine: ``sequential`` trains clients one by one, ``vectorized`` side by side as one stack of models, ``auto``
            side by side where that is faster and the module's class declares ``stackable = True``: its training step
            is a function of batch, parameters and buffers (docs/speed.md).
        compile: write the steps of a stack in C; ``auto`` if rounds are long enough to pay for it.
        workers: processes that share the clients which are trained one by one, each with one thread; threads, where
            steps are written in C.
        restart_schedulers: start schedulers with interval "step", and learning rates that the module sets itself, anew
            in every visit. By default they count all local steps of the run, as in a plain ``Trainer``.
        store: keep what clients remember in ``memory``, or on ``disk``; ``auto`` decides by what the clients that the
            run can visit need (docs/memory.md).
        store_dir: folder of memories on disk; ``client_memory`` beside the checkpoints by default.
        on_client_error: ``raise`` ends the fit at the first client that fails, ``skip`` leaves it out of the round,
            ``Retry(n)`` visits it n times more and then leaves it out; or a
            :class:`~lightning_fed.core.FailurePolicy` with bounds and limits (docs/failures.md).
        personal: pattern of names, or a list of them, of the parameters and buffers that stay with the client, such as
            ``"head.*"``: each client trains its own, and never sends it (docs/personal.md).

    Two clients want the lines 2x + 1 and 4x + 3; the federation finds the best line for both:

    >>> import pytorch_lightning as pl
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule
    >>> from lightning_fed.algorithms import FedADMM
    >>> class Line(pl.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(1, 1)
    ...
    ...     def training_step(self, batch):
    ...         x, y = batch
    ...         return (self.layer(x) - y).square().mean()
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> clients = {"ann": TensorDataset(x, 2 * x + 1), "bob": TensorDataset(x, 4 * x + 3)}
    >>> line, server = Line(), FederatedServer(FedADMM(eta=1.0), local_steps=10)
    >>> trainer = pl.Trainer(max_epochs=20, callbacks=[server], barebones=True)  # without logs, bars and checkpoints
    >>> trainer.fit(line, datamodule=FederatedDataModule(clients, batch_size=20))
    >>> round(line.layer.weight.item(), 2), round(line.layer.bias.item(), 2), server.rounds_done
    (3.0, 2.0, 20)
    """

    is_server = True

    def __init__(
        self,
        algorithm: Algorithm,  # type: ignore[type-arg]  # the CLI takes any subclass
        clients_per_round: int | None = None,
        sampler: Sampler | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        local_tolerance: float | Tolerance | None = None,
        seed: int | None = None,
        buffers: Buffers = "average",
        evaluate_every: int = 1,
        figure: bool = True,
        engine: EngineName = "auto",
        compile: bool | Literal["auto"] = "auto",
        workers: int = 1,
        restart_schedulers: bool = False,
        store: StoreName = "auto",
        store_dir: str | Path | None = None,
        on_client_error: OnError | Retry | FailurePolicy = "raise",
        personal: list[str] | str | None = None,
    ) -> None:
        self.algorithm, self.clients_per_round = algorithm, clients_per_round
        self.local_steps, self.local_epochs = local_steps, local_epochs
        self.buffers, self.evaluate_every, self.figure = buffers, evaluate_every, figure
        self.engine, self.compile, self.workers = engine, compile, workers
        self.restart_schedulers, self._given_seed = restart_schedulers, seed
        self.store, self.store_dir = store, store_dir
        self.on_client_error, self.personal = as_policy(on_client_error), Personal.of(personal)
        self._check_arguments(sampler)
        if local_steps is None and local_epochs is None:
            self.local_epochs = 1
        self.local_tolerance = None if local_tolerance is None else as_tolerance(local_tolerance)
        check_tolerance(self.local_tolerance, algorithm)
        check_policy(self.on_client_error, type(algorithm).__name__, algorithm.traits.everybody)
        drawn = Full() if clients_per_round is None else Uniform(clients_per_round)
        self.sampler = drawn if sampler is None else sampler
        self._turnover = Turnover(self.sampler.check)
        self._forget()

    def _check_arguments(self, sampler: Sampler | None) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(
                f"FederatedServer.algorithm must be an Algorithm such as FedADMM(), got {self.algorithm!r}."
            )
        if self.clients_per_round is not None and sampler is not None:
            raise ValueError(
                "Give FederatedServer either clients_per_round or sampler, not both; clients_per_round=None (null in a"
                " config) leaves cohorts to the sampler."
            )
        if sampler is not None and not isinstance(sampler, Sampler):
            raise TypeError(f"FederatedServer.sampler must be a Sampler such as Uniform(10), got {sampler!r}.")
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("Give FederatedServer either local_steps or local_epochs, not both.")
        for name in ("clients_per_round", "local_steps", "local_epochs"):
            whole(self, name, 1, optional=True)
        whole(self, "evaluate_every", 0)
        one_of(self, "buffers", ("average", "server", "local"))
        one_of(self, "restart_schedulers", (True, False))
        one_of(self, "store", ("auto", "memory", "disk"))
        whole(self, "workers", 1)
        one_of(self, "engine", ("auto", "sequential", "vectorized"))
        one_of(self, "compile", ("auto", True, False))
        seed = self._given_seed
        if seed is not None and (not is_whole(seed) or seed < 0):
            raise ValueError(f"FederatedServer.seed must be a whole number >= 0, got {seed!r}.")

    def _forget(self) -> None:
        self.federation: Federation | None = None
        self.report: RoundReport | None = None
        self._trainer: pl.Trainer | None = None
        self._module: pl.LightningModule | None = None
        self._player: RoundPlayer | None = None
        self._restored: dict[str, Any] | None = None
        self._history = History()
        self._data: Any = None  # the datamodule of the last fit, validation or test
        self._measured = Measured()
        self._clients: Table | None = None  # from processes in which a fit was
        self._choice = ModelChoice()
        self._records: Path | None = None  # a snapshot of memories, beside the checkpoint that is being restored
        self._memory = ClientMemory(self.store, None if self.store_dir is None else Path(self.store_dir))

    @property
    def rounds_done(self) -> int:
        """Number of rounds that are committed."""
        return max(0, self.federation.rounds_done) if self.federation else 0

    # -- results as data ----------------------------------------------------------------------------------------

    @property
    def history(self) -> Table:
        """One row per round: its number ``round``, every ``federated/*`` metric, and whatever else was logged in it.

        It goes on after a resume; ``trainer.validate`` and ``test`` in a new process read it from their checkpoint. A
        metric that was not logged in a round, such as one that is evaluated every ten rounds, is missing in its row
        (docs/results_as_data.md).
        """
        loop = None if self._trainer is None else self._trainer.fit_loop
        if self._trainer is not None and isinstance(loop, FederatedFitLoop) and loop.epoch_loop.stage != IDLE:
            self.note_round(self._trainer, ended=False)  # a round that is committed, but not validated or ended yet
        return self._history.table

    def note_round(self, trainer: pl.Trainer, ended: bool) -> None:
        """Add to the history what the last round has logged so far, or in all if it has just ``ended``."""
        results = results_of(trainer)
        # not trainer.callback_metrics, which also holds metrics of earlier rounds
        self._history.add(self.rounds_done - 1, results.ended if ended else results.metrics(on_step=False)["callback"])

    def note_metrics(self, round: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that were measured after a round had ended to the history."""
        self._history.add(round, metrics)

    @property
    def clients(self) -> Table:
        """One row per client, in the order of the data: its id, samples, visits, metrics, bytes and local steps.

        Metrics are those of the last evaluation in the fit, or of the last ``trainer.validate`` or ``trainer.test``:
        of the server's model by split (``val_loss``, ``test_loss``), and of the client's own model on held-out data
        (``own_loss``) where the evaluation measured it. Visits, bytes and steps are known after a fit
        (docs/results_as_data.md).
        """
        if self._data is None and self._clients is None:
            raise ValueError("There are no results by client yet. Read server.clients in or after trainer.fit or test.")
        return client_rows(self._data, self.federation, self._measured) if self._clients is None else self._clients

    def results(self) -> dict[str, Any]:
        """Results as data, for the process that forked this one."""
        known = self._data is not None or self._clients is not None
        return {"history": list(self.history), "clients": self.clients if known else None}

    def take_results(self, results: Mapping[str, Any]) -> None:
        """Take the results of a fit, a validation or a test in processes that were forked from this one."""
        self._history, self._clients = History(results["history"]), results["clients"]

    def note_clients(self, trainer: pl.Trainer, measured: Measured) -> None:
        """Keep the results of an evaluation by client."""
        self._data, self._measured, self._clients = trainer.datamodule, measured, None

    @property
    def local_work(self) -> LocalWork:
        """The work of a visit, and its seed."""
        seconds = self.on_client_error.max_seconds
        return LocalWork(self.seed, self.local_steps, self.local_epochs, self.local_tolerance, seconds=seconds)

    def client_loop(self, trainer: pl.Trainer) -> ClientLoop:
        """The loop that does a client's local work."""
        return ClientLoop(trainer, self.local_work)

    def most_batches(self, trainer: pl.Trainer) -> int:
        """Number of batches of the longest visit of any client."""
        return max(planned_batches(trainer, self.local_work).values())

    @property
    def local_time(self) -> int:
        """Number of optimiser steps before this round, as a plain trainer would count them: T per round."""
        return self.federation.local_time if self.federation else 0

    @property
    def seed(self) -> int:
        """Seed of the run: as given, else that of ``seed_everything``, else 0."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._given_seed is None else self._given_seed

    @property
    def is_seeded(self) -> bool:
        """Whether somebody has set a seed; otherwise the initial weights differ from run to run."""
        return self._given_seed is not None or "PL_GLOBAL_SEED" in os.environ

    # -- Lightning: set up, checkpoints -------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_packages(trainer, pl_module)
        keep_best(trainer.loggers)
        if stage == "fit":
            check_setup(trainer, pl_module, self.algorithm, self.sampler, self.local_work)
        adopt(trainer)
        if stage == "fit":
            facts = {"seed": self.seed, "settings": self._settings(), "algorithm": hyper_parameters(self.algorithm)}
            rest = [self.evaluate_every, self.engine, self.compile, self.store, str(self.store_dir)]
            check_federation(trainer, pl_module, {**facts, "evaluation, engine and store": rest})
        if stage != "fit":
            return
        if self._trainer is not trainer:
            self._forget()
            self._trainer = trainer
        self._data, self._clients = trainer.datamodule, None
        if not isinstance(trainer.fit_loop, FederatedFitLoop):
            FederatedFitLoop.install(trainer, self)
        if self.federation is not None and self.rounds_done:
            moved = self._turnover.apply(self.federation, _examples(trainer))
            ours = {*self.federation.client_ids, *self.federation.expelled}
            same_clients = ours == {*trainer.datamodule.client_ids, *self.federation.expelled}
            if self._module is not pl_module or not same_clients:
                raise ValueError(
                    f"This trainer has already run {self.rounds_done} rounds with another"
                    f" {'set of clients' if self._module is pl_module else 'module'}, whose states it holds."
                    " Use a new Trainer for another federation; for clients that left or joined, call expel or admit."
                )
            if moved:
                self._show_server()
        if not isinstance(trainer.strategy.checkpoint_io, FederatedCheckpointIO):
            trainer.strategy.checkpoint_io = FederatedCheckpointIO(trainer.strategy.checkpoint_io, self._disk_store)
        set_linker(trainer, link_last)
        upload_server_only(trainer.loggers)
        trainer.fit_loop.epoch_loop.client_loop.work = self.local_work
        settings = self.logged_settings(trainer)
        equip(trainer, pl_module, self.evaluate_every, self.local_tolerance is not None, settings)
        if self.figure:
            add_figure(trainer, pl_module)
        trainer.fit_loop.clock.prepare()
        if self._player is not None:
            self._player.begin_fit(self._round_settings())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._memory.end_fit(trainer)
            check_sigterm(trainer)

    def _disk_store(self) -> DiskStore | None:
        """The store whose records belong to a checkpoint."""
        store = None if self.federation is None else self.federation.store
        return store if isinstance(store, DiskStore) else None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        tell_of_new_runs(trainer.loggers, checkpoint.get(RUNS, ()))
        named = checkpoint.get(RECORDS)
        self._records = None if named is None else Path(named["path"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.personal.check(pl_module)  # not in setup: a module may be built after it, by configure_model
        self._memory.begin_fit(trainer)  # not in setup: other callbacks' folders are known only after theirs
        trainer.fit_loop.clock.running = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(trainer.fit_loop, FederatedFitLoop):
            trainer.fit_loop.clock.running = False
            self._memory.end_fit(trainer)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = STATUS  # Lightning's own is 0, as if the fit had ended

    def state_dict(self) -> dict[str, Any]:
        federation = self.federation.state_dict() if self.federation else None
        failed = self._player.failed.in_a_row if self._player else {}
        settings = {"seed": self.seed, "settings": self._settings(), "failed_in_a_row": dict(failed)}
        return {**settings, "federation": federation, "history": list(self.history)}

    def _settings(self) -> dict[str, Any]:
        """Settings besides the algorithm that decide the results of a run."""
        settings = {"sampler": repr(self.sampler), "local_steps": self.local_steps, "local_epochs": self.local_epochs}
        tolerance = None if self.local_tolerance is None else repr(self.local_tolerance)
        settings |= {"local_tolerance": tolerance, "buffers": self.buffers}
        settings |= {"restart_schedulers": self.restart_schedulers, "on_client_error": repr(self.on_client_error)}
        return {**settings, "personal": list(self.personal.patterns) or None}

    def logged_settings(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Settings of the federation, for the loggers."""
        data: Any = trainer.datamodule
        return {
            "federated": {
                **({"data": data.description} if data.description else {}),
                "algorithm": hyper_parameters(self.federation.algorithm if self.federation else self.algorithm),
                "sampler": hyper_parameters(self.sampler),
                "clients": len(data.client_ids),
                "local_steps": self.local_steps,
                "local_epochs": self.local_epochs,
                **({"local_tolerance": hyper_parameters(self.local_tolerance)} if self.local_tolerance else {}),
                "buffers": self.buffers,
                **({"personal": list(self.personal.patterns)} if self.personal else {}),
                "seed": self.seed,
            }
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        if self._trainer is None:  # validate or test in a new process
            self._history = History(state_dict.get("history", ()))

    def resume(self, trainer: pl.Trainer, loop_state: dict[str, Any] | None) -> None:
        """Load the restored state; refuse checkpoints without one, and the state of another federation."""
        check_resumed(loop_state, self._restored, self.seed)
        assert self._restored is not None
        warn_if_changed(self._restored["settings"], self._settings())
        if (saved := self._restored["federation"]) is not None:
            federation = self._begin(trainer, saved)
            assert self._player is not None
            self._player.failed.in_a_row = dict(self._restored.get("failed_in_a_row", {}))
            self._history = History(self._restored.get("history", ()))
            restore_state(trainer.lightning_module, federation.buffers)
            self._show_server()
        self._restored = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_optimizers(trainer, self.algorithm)
        check_optimizers_alike(trainer)
        check_monitored(trainer, self.evaluate_every)
        self._choice.check(trainer)
        if self.rounds_done and (name := self._touched(trainer)):
            warnings.warn(
                f"Parameter {name} is not what it was after round {self.rounds_done - 1}. The fit goes on with the"
                " server's model. To start from other weights use a new Trainer.",
                stacklevel=2,
            )
            self._show_server()

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before_check = ModuleState(pl_module)

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        restore_state(pl_module, {**self._before_check.parameters, **buffers_of(pl_module)})
        del self._before_check

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._player is not None and self._player.workspace is not None:
            self._player.workspace.server_checkpoint(checkpoint)
        if runs := runs_of(trainer.loggers):
            checkpoint[RUNS] = runs

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        weigh_by_samples(trainer, trainer.val_dataloaders, batch_idx)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        weigh_by_samples(trainer, trainer.test_dataloaders, batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.federation is not None and trainer.state.fn == "fit" and (name := self._touched(trainer)):
            self._show_server()
            if not is_renormed(pl_module, name):
                warnings.warn(
                    f"Validation changed parameter {name}. It is the server's again: evaluation trains nothing.",
                    stacklevel=2,
                )
        if trainer.state.fn == "fit":
            validated = validation_metrics_of(trainer)
            self._choice.check(trainer, validated.keys())  # in the sanity check too, before round 0
            if not trainer.sanity_checking:
                self._history.add(self.rounds_done - 1, validated)
        elif isinstance(data := trainer.datamodule, FederatedDataModule):
            self._evaluate_clients(trainer, "val" if data.has_split("val") else "test")
        self._reached(trainer, VALIDATED)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.datamodule, FederatedDataModule):
            self._evaluate_clients(trainer, "test")

    def _evaluate_clients(self, trainer: pl.Trainer, split: str) -> None:
        """Evaluate a split by client, after Lightning's own ``validate`` or ``test`` of all the data in it."""
        if trainer.fast_dev_run or trainer.barebones or not trainer.datamodule.has_split(split):
            return
        if self.personal and federation_of(trainer) is None:
            rank_zero_info("Results by client are of the server's model: personal parts are known after a fit only.")
        expelled = () if self.federation is None else self.federation.expelled
        self.note_clients(trainer, Measured(evaluate_outside_fit(trainer, split, expelled)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reached(trainer, ENDED)

    def _reached(self, trainer: pl.Trainer, stage: str) -> None:
        loop = trainer.fit_loop
        if isinstance(loop, FederatedFitLoop) and loop.epoch_loop.stage in (TRAINED, VALIDATED):
            loop.epoch_loop.stage = stage

    # -- clients that leave and join ----------------------------------------------------------------------------

    def expel(self, client: ClientId) -> None:
        """Take a client that is gone for good out of the federation, and its share out of the server's memory.

        Between fits, before a fit that resumes, or in a callback's ``on_round_end``. A client that only fails to reply
        is not neutral: its share of what FedADMM, FedDR, FedDyn, Scaffold and FedSplit remember stays in the mean.
        """
        self._turn_over(self._turnover.leaving, client)

    def admit(self, client: ClientId) -> None:
        """Take a client in that joined the data between two fits, with the state of round 0."""
        self._turn_over(self._turnover.joining, client)

    def _turn_over(self, queue: list[ClientId], client: ClientId) -> None:
        if self._player is not None and self._player.workspace is not None:
            raise ValueError(f"Client {client!r} cannot leave or join in the middle of a round. Use on_round_end.")
        queue.append(client)
        if self.federation is not None and self._trainer is not None and self._player is not None:
            known = {*_examples(self._trainer), *self.federation.client_ids}
            if client in known:
                self._turnover.apply(self.federation, _examples(self._trainer))
                self._player.begin_fit(self._round_settings())
                self._show_server()

    def personal_model(self, client: ClientId, own: bool = False) -> dict[str, Any]:
        """A state dict of the server's model with a client's personal part, to deploy it at that client.

        ``own`` gives the client's own model x_i in place of the server's, and its own buffers, if the algorithm keeps
        one. A client that has not been visited has the first model's personal part.
        """
        if self.federation is None or self._player is None:
            raise ValueError("There is no federation yet. Call personal_model in the fit, or after it.")
        if client not in self.federation.weights:
            raise ValueError(f"Client {client!r} is not in the federation of {len(self.federation.weights)} clients.")
        return self._player.model_of(client, own)

    # -- one round ----------------------------------------------------------------------------------------------

    def begin_round(self, trainer: pl.Trainer) -> list[ClientId]:
        """Draw the cohort of the next round, and load the server's model into the module."""
        self.check_untouched(trainer)
        federation = self.federation or self._begin(trainer)
        federation.follow(trainer.lightning_module)
        self._show_server()
        federation.take_state(trainer.lightning_module)
        return self._cohort(trainer, federation)

    def _cohort(self, trainer: pl.Trainer, federation: Federation, attempt: int = 0) -> list[ClientId]:
        """The cohort of an attempt at the next round, a function of (seed, round, attempt)."""
        ids, seed = federation.client_ids, derive_seed(self.seed, attempt, "attempt") if attempt else self.seed
        cohort = [ids[i] for i in self.sampler.cohort(len(ids), seed, self.rounds_done)]
        return cohort[:2] if trainer.fast_dev_run and not self.algorithm.traits.everybody else cohort

    def _touched(self, trainer: pl.Trainer) -> str | None:
        """Name of a trained parameter that differs from the server's model; None if none does.

        Personal parameters of the server's model are those of the first model.
        """
        federation, parameters = self.federation, parameters_of(trainer.lightning_module)
        assert federation is not None
        for name, value in {**federation.layout.split(federation.server.x_bar), **federation.first}.items():
            if name in parameters and not torch.equal(parameters[name], value.to(parameters[name])):
                return name
        return None

    def check_untouched(self, trainer: pl.Trainer) -> None:
        """Refuse a trained parameter that was changed between rounds, because the algorithm would ignore the change."""
        if self.federation is not None and (name := self._touched(trainer)):
            raise ValueError(
                f"Parameter {name} was changed outside a client's visit, in a hook that runs once per round such as"
                f" on_train_epoch_start, on_train_epoch_end, or a callback's on_train_batch_end. The server's model is"
                f" what {type(self.algorithm).__name__} computes{_and_first(name, self.federation)}, so the change"
                " would be lost. For a constraint use the algorithm's g, such as g=Box(-1, 1); or change the parameter"
                " in a hook of the module that runs for every batch of a client: on_train_batch_start,"
                " on_train_batch_end or optimizer_step."
            )

    def run_round(self, trainer: pl.Trainer, cohort: list[ClientId]) -> RoundReport:
        """Play and commit a round; also after an error, the module holds the server's last committed model."""
        assert self.federation is not None
        assert self._player is not None
        draw, is_measured = partial(self._cohort, trainer, self.federation), partial(self._is_evaluated, trainer)
        self.report = reported_round(self._player, cohort, draw, is_measured)
        self._history.add(self.report.round, self.report.logged)
        return self.report

    def _is_evaluated(self, trainer: pl.Trainer) -> bool:
        """Whether the clients are evaluated after the round that was committed last."""
        last = self.rounds_done in (trainer.max_epochs, trainer.max_steps)
        return self.evaluate_every > 0 and (last or self.rounds_done % self.evaluate_every == 0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert self.report is not None
        if not trainer.barebones:
            log_numbers(trainer, "on_train_batch_end", self.report.logged)
        notify(trainer, "on_round_end", self.report)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        question = trainer.fit_loop.epoch_loop.client_loop.question
        if question is not None:
            question.add_to(optimizer)

    def _begin(self, trainer: pl.Trainer, saved: dict[str, Any] | None = None) -> Federation:
        """Make the federation, as it was ``saved`` in a checkpoint or before round 0."""
        data = trainer.datamodule
        self._module = trainer.lightning_module
        examples = _examples(trainer)
        if saved is None:
            examples = self._turnover.staying(examples)
        lr_sum = self._planned_lr_sum(trainer, examples) if saved is None else saved.get("lr_sum", float("nan"))
        self.federation = federation = self._found(examples, self._module, lr_sum)
        if self.personal:
            sent = num_bytes(federation.x0)
            rank_zero_info(self.personal.described(self._module, federation.first, sent))
        federation.expelled = [cid for cid in data.client_ids if cid not in examples]
        if saved is not None:
            self._turnover.load(federation, saved)
        need = Need.of(trainer, federation, self.sampler, self.buffers == "local")
        self._memory.open(trainer, federation, need, self._records, (saved or {}).get("store"))
        if saved is not None:
            self._turnover.apply(federation, examples)
        self._player = RoundPlayer(trainer, self.federation, self._round_settings(), self._engines())
        self._tell_plan(trainer)
        return self.federation

    def _found(self, examples: Mapping[ClientId, int], module: pl.LightningModule, lr_sum: float) -> Federation:
        return Federation(self.algorithm, examples, module, lr_sum, self.personal)

    def _engines(self) -> Choice:
        return Choice(self.engine, self.compile, self.workers)

    def _planned_lr_sum(self, trainer: pl.Trainer, examples: Mapping[ClientId, int]) -> float:
        """The planned sum of the step sizes of a visit before round 0, if the algorithm asks for it."""
        if not self.algorithm.traits.plans_steps:
            return float("nan")
        weights = {cid: self.algorithm.weight(count) for cid, count in examples.items()}
        batches = {cid: count for cid, count in planned_batches(trainer, self.local_work).items() if cid in weights}
        return StepSizePlan(batches, weights).lr_sum(trainer.fit_loop.epoch_loop.client_loop, Workspace(trainer, {}))

    def _tell_plan(self, trainer: pl.Trainer) -> None:
        """Log the numbers that settings such as ``eta="auto"`` stand for."""
        assert self.federation is not None
        planned = self.algorithm.planned(self.federation.lr_sum)
        if planned is self.algorithm:
            return
        steps = f"the step sizes of a visit sum to {self.federation.lr_sum:g}"
        rank_zero_info(f"{short(self.algorithm)} is {short(planned)} here: {steps}.")
        for logger in trainer.loggers:
            logger.log_hyperparams(self.logged_settings(trainer))

    def _round_settings(self) -> RoundSettings:
        policy = self.on_client_error
        return RoundSettings(self.local_work, self.sampler, self.buffers, self.restart_schedulers, policy)

    def _show_server(self) -> None:
        assert self._player is not None
        self._player.show_server()


def _and_first(name: str, federation: Federation) -> str:
    return " and the first model's personal part" if name in federation.first else ""


def _examples(trainer: pl.Trainer) -> dict[ClientId, int]:
    """Numbers of training samples of all clients that the data have."""
    data: Any = trainer.datamodule
    return {cid: data.num_examples(cid) for cid in data.client_ids}

"""All imports of Lightning, and all private names and attributes of Lightning and torchmetrics that the package uses.

No other module imports Lightning or uses its private names, so that supporting another version changes this file and
the table of names in :mod:`lightning_fed.lightning.package` only, which also decides between ``lightning.pytorch`` and
``pytorch_lightning``. Types are checked against the latter. A contract test names each private attribute, and compares
the table with the imports (tests/integration/test_lightning_door.py).
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from lightning_fed.lightning.mixtures import watch_late_imports
from lightning_fed.lightning.package import ROOTS, TRAINER, check_lightning_version, load

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from lightning_fabric.utilities.seed import _collect_rng_states as collect_rng_states
    from lightning_fabric.utilities.seed import _set_rng_states as set_rng_states
    from lightning_fabric.utilities.seed import reset_seed
    from pytorch_lightning.callbacks import (
        BatchSizeFinder,
        Checkpoint,
        EarlyStopping,
        LearningRateFinder,
        ModelCheckpoint,
        ModelPruning,
        ProgressBar,
        RichProgressBar,
        StochasticWeightAveraging,
        TQDMProgressBar,
    )
    from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.loggers import (
        CometLogger,
        CSVLogger,
        Logger,
        MLFlowLogger,
        TensorBoardLogger,
        WandbLogger,
    )
    from pytorch_lightning.loops.fit_loop import _FitLoop
    from pytorch_lightning.loops.loop import _Loop as Loop
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
    from pytorch_lightning.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
    from pytorch_lightning.plugins.precision import DoublePrecision, Precision
    from pytorch_lightning.profilers import PassThroughProfiler
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from pytorch_lightning.trainer.call import _call_callback_hooks as call_callback_hooks
    from pytorch_lightning.trainer.call import _call_lightning_module_hook as call_module_hook
    from pytorch_lightning.trainer.call import _call_strategy_hook as call_strategy_hook
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_only
    from pytorch_lightning.utilities.combined_loader import CombinedLoader
    from pytorch_lightning.utilities.data import _extract_batch_size as extract_batch_sizes
    from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden as is_overridden_in
    from pytorch_lightning.utilities.seed import isolate_rng
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
else:
    pl = import_module(TRAINER)
    globals().update(load())
    watch_late_imports()

__all__ = [
    "ArgsType",
    "AsyncCheckpointIO",
    "BatchSizeFinder",
    "CSVLogger",
    "Checkpoint",
    "CheckpointIO",
    "CometLogger",
    "DDPStrategy",
    "DoublePrecision",
    "EarlyStopping",
    "LearningRateFinder",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningOptimizer",
    "Logger",
    "Loop",
    "MLFlowLogger",
    "MisconfigurationException",
    "ModelCheckpoint",
    "ModelPruning",
    "MultiProcessingLauncher",
    "PassThroughProfiler",
    "Precision",
    "ProgressBar",
    "ResultCollection",
    "RichProgressBar",
    "SIGTERMException",
    "SaveConfigCallback",
    "SingleDeviceStrategy",
    "StochasticWeightAveraging",
    "Strategy",
    "StrategyRegistry",
    "TQDMProgressBar",
    "TensorBoardLogger",
    "TorchCheckpointIO",
    "WandbLogger",
    "batch_size_of",
    "call_callback_hooks",
    "call_module_hook",
    "call_strategy_hook",
    "check_lightning_version",
    "collect_rng_states",
    "is_overridden",
    "is_param_in_hook_signature",
    "isolate_rng",
    "owns_sigterm",
    "pl",
    "rank_zero_info",
    "rank_zero_only",
    "reset_seed",
    "set_rng_states",
]

warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`")  # torch deprecates a call in Lightning


def __getattr__(name: str) -> Any:
    """Import Lightning's command line on first use, because the import takes a second."""
    if name in ("ArgsType", "LightningArgumentParser", "LightningCLI", "SaveConfigCallback"):
        return getattr(import_module(f"{TRAINER}.cli"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_overridden(name: str, instance: object, parent: type | None = None) -> bool:
    """Whether a class has its own version of a method of Lightning; Lightning's own raises for foreign callbacks."""
    known = (pl.LightningModule, pl.LightningDataModule, pl.Callback)
    if instance is None or parent is not None or isinstance(instance, known):
        return bool(is_overridden_in(name, instance, parent))
    method = getattr(type(instance), name, None)
    return method is not None and str(getattr(method, "__module__", "")).partition(".")[0] not in ROOTS


def batch_size_of(batch: Any) -> int:
    """Guess the number of samples of a batch from a user's own loader by its first tensor, as Lightning does.

    Warns once if the batch has no tensors, or if they disagree; a batch without tensors counts as one sample.
    """
    sizes = _sizes_in(batch)
    if len(set(sizes)) != 1:
        _warn_of_guess(type(batch).__name__, tuple(dict.fromkeys(sizes)))
    return sizes[0] if sizes else 1


def _sizes_in(batch: Any) -> list[int]:
    try:
        return [size for size in extract_batch_sizes(batch) if size is not None]
    except Exception:  # a batch may be any object, and raise any error when it is inspected
        return []


@cache
def _warn_of_guess(kind: str, sizes: tuple[int, ...]) -> None:
    found = (
        f"tensors of {' and '.join(map(str, sizes))} rows; the first is taken" if sizes else "no tensor; it counts as 1"
    )
    warnings.warn(
        f"The number of samples of a {kind} from a loader of your own is not known: it has {found}. Means over batches"
        " are weighted by this number. To have samples counted, return a torch DataLoader of map-style data, or give"
        " FederatedDataModule a collate_fn instead of an overridden loader.",
        stacklevel=3,
    )


# -- loops: private attributes that Lightning reads, under public names -------------------------------------------


class FitLoop(_FitLoop):
    """Lightning's fit loop, with public names for the private attributes that are set here."""

    def has_data(self) -> bool:
        return self._combined_loader is not None

    def set_one_batch(self) -> None:
        """Make an epoch one batch long; its content is not used."""
        self._combined_loader = CombinedLoader([range(1)], "max_size_cycle")
        self.max_batches = 1

    def take_data_from(self, old: Any) -> None:
        self._data_source = old._data_source


class EpochLoop(_TrainingEpochLoop):
    """Lightning's epoch loop, with public names for the private attributes that are set here."""

    def is_accumulating(self) -> bool:
        """Whether the current batch ends without an optimiser step."""
        return bool(super()._should_accumulate())

    def _should_accumulate(self) -> bool:
        return self.is_accumulating()

    def collect_in(self, results: Any) -> None:
        """Collect logged values in ``results``."""
        self._results = results

    def count_batches_that_stepped(self, batches: int) -> None:
        self._batches_that_stepped = batches


def results_of(trainer: pl.Trainer) -> Any:
    """The values logged in training, which are those of this round."""
    return trainer.fit_loop.epoch_loop._results


def set_results(trainer: pl.Trainer, results: Any) -> None:
    trainer.fit_loop.epoch_loop._results = results


def validation_metrics_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The values that the last validation of a fit logged, over all of its loaders."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    found: dict[str, Any] = {}
    current = results.dataloader_idx  # Lightning gives the values of one loader at a time; None: of none in particular
    for index in dict.fromkeys(metric.meta.dataloader_idx for metric in results.result_metrics):
        results.dataloader_idx = index
        found |= results.metrics(on_step=False)["callback"]
    results.dataloader_idx = current
    return found


def active_results_of(trainer: pl.Trainer) -> Any:
    """The values logged by the loop that runs now; None if no loop runs."""
    return trainer._results


# -- the trainer's connectors --------------------------------------------------------------------------------------


def start_batch(trainer: pl.Trainer, batch: Any) -> None:
    """Set the batch to which the trainer's log assigns the next values."""
    trainer._logger_connector.on_batch_start(batch)


def end_batch(trainer: pl.Trainer) -> None:
    trainer._logger_connector.on_batch_end()


def is_first_log_in(trainer: pl.Trainer, hook: str) -> bool:
    """Whether values that were logged in this hook earlier have to be reset."""
    return bool(trainer._logger_connector.should_reset_tensors(hook))


def current_hook(trainer: pl.Trainer) -> str | None:
    """The hook in which the last value was logged."""
    return trainer._logger_connector._current_fx


def set_current_hook(trainer: pl.Trainer, hook: str | None) -> None:
    trainer._logger_connector._current_fx = hook


def restore_callback_metrics(trainer: pl.Trainer, metrics: dict[str, Any]) -> None:
    trainer._logger_connector._callback_metrics.update(metrics)


def checkpoint_connector(trainer: pl.Trainer) -> Any:
    """The trainer's object that writes checkpoints."""
    return trainer._checkpoint_connector


def tell_checkpoints(trainer: pl.Trainer) -> None:
    """Have ``go_on_from(path)`` of loggers called before they open their run, with the checkpoint of each stage.

    Lightning opens runs before it calls a hook of callbacks, and tells the path of the checkpoint only later.
    """
    connector = trainer._checkpoint_connector
    vars(connector)["_select_ckpt_path"] = partial(_select_and_tell, connector)


def _select_and_tell(connector: Any, *args: Any, **kwargs: Any) -> Any:
    path = type(connector)._select_ckpt_path(connector, *args, **kwargs)
    for logger in connector.trainer.loggers:
        if hasattr(logger, "go_on_from"):
            logger.go_on_from(path)
    return path


def has_last_checkpoint(trainer: pl.Trainer) -> bool:
    """Whether ``ckpt_path="last"`` names a file; without one Lightning warns, and goes on with the module as it is."""
    savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return any(callback._find_last_checkpoints(trainer) for callback in savers)


def epochs_between_looks(callback: Any) -> int:
    """Epochs after which a callback that has to find its ``monitor`` reads it; 0 if it need not find it."""
    if isinstance(callback, ModelCheckpoint):
        return int(callback._every_n_epochs)
    return int(isinstance(callback, EarlyStopping))


def set_linker(trainer: pl.Trainer, link: Callable[[pl.Trainer, str, str], None]) -> None:
    """Have ``ModelCheckpoint(save_last="link")`` make its link by ``link(trainer, filepath, linkpath)``.

    A subclass that makes links in its own way is left alone.
    """
    own = ModelCheckpoint._link_checkpoint
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and type(callback)._link_checkpoint is own:
            vars(callback)["_link_checkpoint"] = link


def owns_sigterm(trainer: pl.Trainer) -> bool:
    """Whether a fit's only handler of SIGTERM is the one by which Lightning notes it."""
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
    return bool(handlers == [trainer._signal_connector._sigterm_notifier_fn])


def wandb_axis(logger: WandbLogger) -> tuple[str, str]:
    """What a W&B logger puts before the names of metrics, and the name of the metric that is their step."""
    synced = logger._wandb_init.get("sync_tensorboard")
    prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
    return prefix, "global_step" if synced else "trainer/global_step"


# -- several processes ---------------------------------------------------------------------------------------------


class PlainStrategy(DDPStrategy):
    """Lightning's DDP strategy without DDP: its launchers and ranks, around a module that is not wrapped."""

    forking: type[MultiProcessingLauncher]  # the launcher that forks, or spawns

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = self.forking(self, self._start_method)

    def setup(self, trainer: pl.Trainer) -> None:
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: Any) -> Any:
        return model

    @property
    def patience(self) -> timedelta:
        """Longest time to wait for another process."""
        assert self._timeout is not None
        return self._timeout


def share_no_loaders(trainer: pl.Trainer) -> None:
    """Give every process all batches of validation and test: Lightning would deal them out, and repeat some."""
    trainer._accelerator_connector.use_distributed_sampler = False


# -- modules, callbacks, metrics -----------------------------------------------------------------------------------

#: Attributes of a module in which Lightning keeps its own bookkeeping.
NOTES = frozenset({"_current_fx_name", "_param_requires_grad_state", "_metric_attributes"})


def enter_hook(module: pl.LightningModule, hook: str) -> None:
    """Set the hook in which ``module.log`` is called."""
    module._current_fx_name = hook


def before_transfer(module: pl.LightningModule, batch: Any) -> Any:
    """A batch after ``on_before_batch_transfer`` of the module or the datamodule."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def leaves_bar(callback: TQDMProgressBar | RichProgressBar) -> bool:
    """Whether a progress bar stays on the screen after each epoch."""
    return bool(callback._leave)


class RichBar(RichProgressBar):
    """Lightning's rich bar, with public names for private methods that are overridden here."""

    describe: Callable[[int], str]  # the text before the bar of an epoch

    def _get_train_description(self, current_epoch: int) -> str:
        return self.describe(current_epoch)


def update_count(metric: Metric) -> int:
    return int(metric._update_count)


def note_merged(metric: Metric) -> None:
    """Count a merged update, and drop the value that was computed before it."""
    metric._update_count += 1
    metric._computed = None


def is_read_by_user(metric: Metric) -> bool:
    """Whether ``compute`` is called by a user, not inside ``forward``, which computes the value of one batch."""
    return bool(metric._should_unsync)

"""The contract with Lightning's private parts: if one of these moves, this file says which."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import pytorch_lightning as pl
from helpers.modules import quiet_trainer
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy
from torchmetrics import MeanMetric

import lightning_fed
from lightning_fed import lightning as door
from lightning_fed.lightning.package import NAMES, ROOTS

PACKAGE = Path(lightning_fed.__file__).parent


def test_the_installed_lightning_is_supported() -> None:
    door.check_lightning_version()


@pytest.mark.parametrize("version", ["2.5.0", "2.6.2", "2.6.5", "2.7.0", "3.0"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError, match=rf"lightning >=2.6.6,<2.7, found {version}"):
        door.check_lightning_version(version)


#: Private attributes of Lightning and torchmetrics that we touch, by an owner that has them.
PRIVATE = {
    "_results": lambda trainer: trainer.fit_loop.epoch_loop,
    "_combined_loader": lambda trainer: trainer.fit_loop,
    "_data_source": lambda trainer: trainer.fit_loop,
    "_batches_that_stepped": lambda trainer: trainer.fit_loop.epoch_loop,
    "_should_accumulate": lambda trainer: trainer.fit_loop.epoch_loop,
    "_logger_connector": lambda trainer: trainer,
    "_checkpoint_connector": lambda trainer: trainer,
    "_select_ckpt_path": lambda trainer: trainer._checkpoint_connector,
    "_current_fx": lambda trainer: trainer._logger_connector,
    "_callback_metrics": lambda trainer: trainer._logger_connector,
    "_current_fx_name": lambda trainer: pl.LightningModule(),
    "_param_requires_grad_state": lambda trainer: pl.LightningModule(),
    "_metric_attributes": lambda trainer: pl.LightningModule(),
    "_on_before_batch_transfer": lambda trainer: pl.LightningModule,
    "_get_train_description": lambda trainer: RichProgressBar(),
    "_leave": lambda trainer: TQDMProgressBar(),
    "_signal_connector": lambda trainer: trainer,
    "_sigterm_notifier_fn": lambda trainer: trainer._signal_connector,
    "_link_checkpoint": lambda trainer: ModelCheckpoint,
    "_find_last_checkpoints": lambda trainer: ModelCheckpoint,
    "_every_n_epochs": lambda trainer: ModelCheckpoint(),
    "_prefix": lambda trainer: WandbLogger(),
    "_wandb_init": lambda trainer: WandbLogger(),
    "_accelerator_connector": lambda trainer: trainer,
    "_timeout": lambda trainer: DDPStrategy(),
    "_setup_model": lambda trainer: DDPStrategy,
    "_launcher": lambda trainer: DDPStrategy(),
    "_start_method": lambda trainer: DDPStrategy(),
    "_configure_launcher": lambda trainer: DDPStrategy,
    "_update_count": lambda trainer: MeanMetric(),
    "_computed": lambda trainer: MeanMetric(),
    "_should_unsync": lambda trainer: MeanMetric(),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_attributes_exist(name: str) -> None:
    assert hasattr(PRIVATE[name](quiet_trainer()), name)


def test_the_rich_bar_tells_too_whether_it_stays() -> None:
    assert door.leaves_bar(RichProgressBar(leave=True))
    assert not door.leaves_bar(TQDMProgressBar())


def modules() -> list[tuple[Path, ast.AST]]:
    """Every module of the package but the door."""
    roots = [PACKAGE, PACKAGE.parent / "models", PACKAGE.parent / "datamodules"]
    found = {path for root in roots for path in root.rglob("*.py")} - {Path(door.__file__)}
    assert len(found) > 100
    return [(path, ast.parse(path.read_text())) for path in sorted(found)]


def test_lightning_is_imported_in_one_file_alone() -> None:
    for path, tree in modules():
        for node in ast.walk(tree):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] in ROOTS for name in named), path


def test_the_table_of_names_has_what_types_are_checked_against() -> None:
    """At run time names come from a table, for the type checker from imports: the same names, from the same modules."""
    tree = ast.parse(Path(door.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    parts = {"pytorch_lightning": "", "lightning_fabric": "fabric."}
    checked = set()
    for node in imports:
        root, _, rest = (node.module or "").partition(".")
        if root in parts and rest != "cli":
            checked |= {(parts[root] + rest, alias.name, alias.asname or alias.name) for alias in node.names}
    pairs = ((place, *name.split("=")) for place, names in NAMES.items() for name in names.split())
    assert {(place, names[0], names[-1]) for place, *names in pairs} == checked


def test_private_attributes_are_touched_in_one_file_alone() -> None:
    for path, tree in modules():
        others = (
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"
        )
        assert not {node.attr for node in others} & PRIVATE.keys(), path


def test_private_methods_are_overridden_in_one_file_alone() -> None:
    private = {name for kind in door.EpochLoop.__mro__[1:] for name in vars(kind) if name.startswith("_")}
    private |= {name for kind in door.FitLoop.__mro__[1:] for name in vars(kind) if name.startswith("_")}
    tree = ast.parse((PACKAGE / "trainer" / "loops.py").read_text())
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    defined = {node.name for loop in loops for node in loop.body if isinstance(node, ast.FunctionDef)}
    assert len(defined) > 10
    assert not {name for name in defined & private if not name.startswith("__")}


def test_the_door_touches_no_other_private_attribute() -> None:
    tree = ast.parse(Path(door.__file__).read_text())
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    assert touched <= {*PRIVATE, "__name__", "__version__"}


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            door.FitLoop,
            "run setup_data reset on_run_start on_advance_start advance on_advance_end on_save_checkpoint"
            " load_state_dict",
        ),
        (
            door.EpochLoop,
            "on_run_start advance on_advance_end update_lr_schedulers _should_accumulate global_step",
        ),
        (door.ResultCollection, "log metrics reset __setitem__"),
        (Precision, "convert_input _after_closure"),
        (pl.LightningModule, "_on_before_batch_transfer"),
        (door.MultiProcessingLauncher, "get_extra_results update_main_process_results"),
        (pl.Trainer, "received_sigterm lr_scheduler_configs optimizers callback_metrics"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_we_override_or_call_exists(owner: type, names: str) -> None:
    missing = [name for name in names.split() if not hasattr(owner, name)]
    assert not missing


def test_the_attributes_the_loops_read_exist() -> None:
    trainer = quiet_trainer()
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for name in ("min_epochs", "max_epochs", "epoch_progress", "max_batches"):
        assert hasattr(fit, name), name
    for name in ("batch_progress", "automatic_optimization", "manual_optimization", "val_loop"):
        assert hasattr(epoch, name), name
    for name in ("on_batch_start", "on_batch_end", "should_reset_tensors"):
        assert hasattr(trainer._logger_connector, name), name


def test_the_last_link_is_made_by_a_function_of_three() -> None:
    assert list(inspect.signature(ModelCheckpoint._link_checkpoint).parameters) == ["trainer", "filepath", "linkpath"]
    assert "self._link_checkpoint(trainer, " in inspect.getsource(ModelCheckpoint._save_last_checkpoint)


def test_gradient_hooks_come_before_clipping() -> None:
    source = inspect.getsource(Precision._after_closure)
    assert source.index("on_before_optimizer_step") < source.index("_clip_gradients")


def test_results_log_takes_what_we_pass_by_keyword() -> None:
    parameters = inspect.signature(door.ResultCollection.log).parameters
    assert {"on_step", "on_epoch", "batch_size", "sync_dist"} <= parameters.keys()

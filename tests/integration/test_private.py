"""The contract with Lightning's private parts: if one of these moves, this file says which."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import pytorch_lightning as pl
from modules import quiet_trainer
from pytorch_lightning.plugins.precision import Precision

import lightning_fed
from lightning_fed.trainer import private

LIGHTNING = ("pytorch_lightning", "lightning_fabric")
PACKAGE = Path(lightning_fed.__file__).parent


def test_the_installed_lightning_is_supported() -> None:
    private.check_lightning_version()


@pytest.mark.parametrize("version", ["2.5.0", "2.6.2", "2.6.5", "2.7.0", "3.0"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError, match=rf"pytorch-lightning >=2.6.6,<2.7, found {version}"):
        private.check_lightning_version(version)


def test_private_names_of_lightning_are_imported_inprivate_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name == "private.py" and path.parent.name == "trainer":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIGHTNING):
                assert not any(alias.name.startswith("_") for alias in node.names), path


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            private._FitLoop,
            "setup_data reset on_run_start on_advance_start advance on_advance_end on_save_checkpoint load_state_dict",
        ),
        (
            private._TrainingEpochLoop,
            "on_run_start advance on_advance_end update_lr_schedulers _should_accumulate global_step",
        ),
        (private._ResultCollection, "log metrics reset __setitem__"),
        (Precision, "convert_input _after_closure"),
        (pl.LightningModule, "_on_before_batch_transfer"),
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
    for name in ("min_epochs", "max_epochs", "epoch_progress", "max_batches", "_data_source", "_combined_loader"):
        assert hasattr(fit, name), name
    for name in ("batch_progress", "automatic_optimization", "manual_optimization", "val_loop", "_results"):
        assert hasattr(epoch, name), name
    assert epoch._batches_that_stepped == 0
    for name in ("_callback_metrics", "_current_fx", "on_batch_start", "on_batch_end", "should_reset_tensors"):
        assert hasattr(trainer._logger_connector, name), name


def test_gradient_hooks_come_before_clipping() -> None:
    source = inspect.getsource(Precision._after_closure)
    assert source.index("on_before_optimizer_step") < source.index("_clip_gradients")


def test_results_log_takes_what_we_pass_by_keyword() -> None:
    parameters = inspect.signature(private._ResultCollection.log).parameters
    assert {"on_step", "on_epoch", "batch_size", "sync_dist"} <= parameters.keys()

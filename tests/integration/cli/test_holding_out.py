"""`lightning-fed fit` with a callback that chooses by validation data holds out a share of the training data."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tunes import FIT, command_line

from lightning_fed.cli import FederatedCLI, main

FEW = [*FIT, "--trainer.limit_val_batches=1.0", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
CHOOSERS = {
    "EarlyStopping": ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor={monitor}"],
    "ModelCheckpoint": ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.monitor={monitor}"],
}


def fit(tmp_path: Path, kind: str, monitor: str, *args: str) -> FederatedCLI:
    words = [word.format(monitor=monitor) for word in CHOOSERS[kind]]
    with command_line():
        cli = main(["fit", *FEW, f"--trainer.default_root_dir={tmp_path}", *words, *args])
    assert cli is not None
    return cli


@pytest.mark.parametrize("kind", CHOOSERS)
def test_a_config_that_chooses_by_validation_data_holds_them_out_and_says_so(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fit(tmp_path, kind, "val_loss").datamodule
    sizes = {cid: (data.num_examples(cid), len(data.client_dataset(cid, "val"))) for cid in data.client_ids}
    assert all(held == round(0.1 * (left + held)) for left, held in sizes.values())
    said = f"{kind} chooses by 'val_loss', and the data have no validation split: every client holds out 10% of its"
    assert capsys.readouterr().err.count(said) == 1


def test_a_share_of_the_config_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = fit(tmp_path, "EarlyStopping", "val_loss", "--data.val_fraction=0.3").datamodule
    cid = data.client_ids[0]
    left, held = data.num_examples(cid), len(data.client_dataset(cid, "val"))
    assert held == round(0.3 * (left + held))
    assert "holds out" not in capsys.readouterr().err


def test_a_choice_by_the_training_objective_holds_out_nothing(tmp_path: Path) -> None:
    options = ["--trainer.callbacks.check_on_train_epoch_end=true"]
    assert not fit(tmp_path, "EarlyStopping", "federated/objective", *options).datamodule.has_split("val")

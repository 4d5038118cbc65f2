"""`lightning-fed data --config ...`: shows a federation, and leaves nothing behind but what it names."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import yaml

import lightning_fed.configs
from lightning_fed.cli import COMMANDS, main

CONFIG = str(Path(lightning_fed.configs.__file__).parent / "synthetic_fedadmm.yaml")

IMAGES = """
import torch
from torch.utils.data import TensorDataset
from lightning_fed import FederatedDataModule

class Squares(FederatedDataModule):
    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        assert self.prepared and stage == "fit"
        self.description = "drawn by a test"
        self.set_split("train", [TensorDataset(torch.rand(5, 784), torch.arange(5) % 2) for _ in range(3)])
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed", "data", "--as-from-a-shell"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as LightningCLI itself


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def clients(folder: Path) -> list[dict[str, str]]:
    with open(folder / "clients.csv", newline="") as file:
        return list(csv.DictReader(file))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["data", *args])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.splitlines()) < 15
    return error


def test_a_federation_is_shown_and_nothing_else_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "--config", CONFIG]) is None
    out = capsys.readouterr().out
    assert out.startswith("synthetic-(1,1)\n")
    assert "total variation, mean" in out
    assert out.splitlines()[-2:] == ["runs/data/clients.csv", "runs/data/clients.png"]
    assert files(tmp_path) == ["runs/data/clients.csv", "runs/data/clients.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["data"]


def test_the_table_has_one_row_per_client(tmp_path: Path) -> None:
    main(["data", "--config", CONFIG, "--out", "here"])
    rows = clients(tmp_path / "here")
    assert len(rows) == 30
    assert list(rows[0]) == ["client", "train", "test", "classes", "total_variation", "jensen_shannon"]
    assert rows[0]["client"] == "f_00000"
    assert all(1 <= int(row["classes"]) <= 10 and 0 <= float(row["total_variation"]) <= 1 for row in rows)


def test_overrides_reach_the_data(tmp_path: Path) -> None:
    main(["data", "--config", CONFIG, "--out=a", "--data.init_args.clients=4"])
    main(["data", "--config", CONFIG, "--data.init_args.clients=4", "--data.init_args.seed=3", "--out=b"])
    main(["data", "--config", CONFIG, "--data.clients=4", "--seed_everything=3", "--out", "c"])
    a, b, c = (clients(tmp_path / name) for name in "abc")
    assert len(a) == len(b) == 4
    assert a != b
    assert b == c


def test_options_of_fit_that_do_not_concern_the_data_are_taken_and_left_alone(tmp_path: Path) -> None:
    options = ["--federated.algorithm.eta=0.5", "--trainer.max_epochs=3", "--model.lr=0.1", "--ckpt_path=last"]
    main(["data", "--config", CONFIG, *options, "--trainer.default_root_dir=elsewhere"])
    assert files(tmp_path) == ["runs/data/clients.csv", "runs/data/clients.png"]
    assert not (tmp_path / "elsewhere").exists()


def test_the_config_that_fit_would_use_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv = ["lightning-fed"]
    with pytest.raises(SystemExit):
        main(["fit", "--config", CONFIG, "--optimizer=SGD", "--optimizer.lr=0.1", "--print_config"])
    (tmp_path / "fit.yaml").write_text(capsys.readouterr().out)
    main(["data", "--config", "fit.yaml"])
    assert len(clients(tmp_path / "runs/data")) == 30


def test_data_are_enough(tmp_path: Path) -> None:
    main(["data", "--data=Synthetic", "--data.clients=2"])
    assert len(clients(tmp_path / "runs/data")) == 2


def test_images_are_drawn_and_a_description_is_printed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squares.py").write_text(IMAGES)
    monkeypatch.syspath_prepend(tmp_path)
    main(["data", "--data=squares.Squares", "--out=out"])
    assert capsys.readouterr().out.startswith("drawn by a test\n")
    assert files(tmp_path / "out") == ["clients.csv", "clients.png", "samples.png"]


# -- errors and help --------------------------------------------------------------------------------------------


def test_a_config_without_data_is_an_error_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(Path(CONFIG).read_text())
    del content["data"], content["base"], content["trainer"]
    (tmp_path / "none.yaml").write_text(yaml.safe_dump(content))
    assert "There are no data. Give a --config with a `data:` section" in refused(capsys, "--config", "none.yaml")
    assert "There are no data" in refused(capsys)
    assert files(tmp_path) == ["none.yaml"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.init_args.b=-1.0", "error: Synthetic.b must be non-negative, got -1.0"),
        ("--data.init_args.colour=red", "colour"),
        ("--config=nowhere.yaml", "nowhere.yaml"),
        ("--ou=there", "--ou"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--config", CONFIG, option)
    assert files(tmp_path) == []


def test_help_says_what_is_taken_and_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: lightning-fed data --config FILE")
    assert all(word in out for word in ("--out FOLDER", "runs/data", "clients.csv", "samples.png", "examples:"))
    assert len(out.splitlines()) < 30


def test_the_help_of_lightning_fed_mentions_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines may end inside lightning-fed
    assert all(f"lightning-fed {name}: {text}" in out for name, text in COMMANDS.items())

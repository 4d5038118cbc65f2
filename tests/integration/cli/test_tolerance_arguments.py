"""A tolerance can be given on the command line, as a number or as a class."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lightning_fed.configs
from lightning_fed.cli import main
from lightning_fed.server import FederatedServer
from lightning_fed.theory import Absolute, Relative, Summable, Tolerance

CONFIG = str(Path(lightning_fed.configs.__file__).parent / "synthetic_fedadmm.yaml")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as LightningCLI itself


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], None),
        (["--federated.local_tolerance=0.1"], Absolute(0.1)),
        (["--federated.local_tolerance=Summable", "--federated.local_tolerance.D=2.0"], Summable(2.0)),
        (["--federated.local_tolerance", "{class_path: Relative, init_args: {gamma: 0.5}}"], Relative(0.5)),
    ],
    ids=str,
)
def test_a_tolerance_reaches_the_server(options: list[str], expected: Tolerance | None) -> None:
    cli = main(["--config", CONFIG, "--trainer.logger=false", *options], run=False)
    (server,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer)]
    assert server.local_tolerance == expected


def test_a_tolerance_that_means_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", CONFIG, "--trainer.logger=false", "--federated.local_tolerance=-1"], run=False)
    assert "epsilon must be positive, got -1" in capsys.readouterr().err

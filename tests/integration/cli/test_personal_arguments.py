"""Personal parts can be given on the command line, as a pattern or a list of patterns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lightning_fed.configs
from lightning_fed.cli import main
from lightning_fed.server import FederatedServer

CONFIG = str(Path(lightning_fed.configs.__file__).parent / "synthetic_fedadmm.yaml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("head.*", ("head.*",)), ("*.weight", ("*.weight",)), ('["*.bias", "!head.*"]', ("*.bias", "!head.*"))],
)
def test_patterns_reach_the_server(given: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as LightningCLI itself
    cli = main(["--config", CONFIG, "--trainer.logger=false", f"--federated.personal={given}"], run=False)
    assert cli is not None
    (server,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer)]
    assert server.personal.patterns == expected

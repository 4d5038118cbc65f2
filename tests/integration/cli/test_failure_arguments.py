"""What to do with clients that fail, on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lightning_fed.configs
from lightning_fed.callbacks import Faults
from lightning_fed.cli import main
from lightning_fed.core import FailurePolicy
from lightning_fed.server import FederatedServer

CONFIG = str(Path(lightning_fed.configs.__file__).parent / "synthetic_fedadmm.yaml")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as LightningCLI itself


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], FailurePolicy()),
        (["--federated.on_client_error=skip"], FailurePolicy("skip")),
        (["--federated.on_client_error", "{n: 2}"], FailurePolicy("skip", retries=2)),
        (
            ["--federated.on_client_error", "{action: skip, min_clients: 5, max_seconds: 60}"],
            FailurePolicy("skip", min_clients=5, max_seconds=60),
        ),
        (
            ["--federated.on_client_error", "{class_path: lightning_fed.core.Retry, init_args: {n: 2}}"],
            FailurePolicy("skip", retries=2),
        ),
    ],
    ids=str,
)
def test_the_policy_is_an_argument(arguments: list[str], expected: FailurePolicy) -> None:
    cli = main(["--config", CONFIG, "--trainer.logger=false", *arguments], run=False)
    (server,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer)]
    assert server.on_client_error == expected


def test_faults_are_a_callback() -> None:
    more = "{class_path: lightning_fed.callbacks.Faults, init_args: {kind: raised, rate: 0.1, trace: {3: [1, 2]}}}"
    cli = main(["--config", CONFIG, "--trainer.logger=false", f"--trainer.callbacks+={more}"], run=False)
    found = next(callback for callback in cli.trainer.callbacks if isinstance(callback, Faults))
    assert (found.kind, found.rate) == ("raised", 0.1)
    assert found.fails(3, 2, seed=0)

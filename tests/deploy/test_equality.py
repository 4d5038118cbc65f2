"""A federation over loopback, with TLS, keys and proxy, has the bits of its simulation."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.deploy
LONG = pytest.mark.skipif("LIGHTNING_FED_DEPLOY" not in os.environ, reason="make test-deploy runs it")


def connections(path: Path) -> set[str]:
    """Where processes have connected to: local sockets as their paths, hosts by name or address."""
    found = set()
    for line in path.read_text().splitlines():
        where: Any = ast.literal_eval(line.partition(" ")[2].replace("<", "'").replace(">", "'"))
        found.add(str(where[0] if isinstance(where, tuple) else where))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", ["FedADMM", pytest.param("Scaffold", marks=LONG)])
def test_a_federation_has_the_bits_of_its_simulation_and_stays_on_loopback(
    algorithm: str, federation: Callable[..., Any], tmp_path: Path
) -> None:
    run = federation(algorithm, rounds=2 if algorithm == "FedADMM" else 4, nodes=2 if algorithm == "FedADMM" else 3)
    expected = run.simulated()
    run.up()
    run.until(run.has_ended, 300)
    assert run.digests == expected
    hosts = {where for where in connections(tmp_path / "audit.txt") if not where.startswith(("/", "b'"))}
    assert "127.0.0.1" in hosts  # the hook works
    assert hosts <= {"127.0.0.1", "localhost", "::1"}
    assert len(list(tmp_path.rglob("run-*.wandb"))) == 1  # W&B runs once, on the server
    for secret in ("server/server.key", "server/superexec.secret", "node-0/node.key", "node-0/superexec.secret"):
        assert (tmp_path / "fed" / secret).stat().st_mode & 0o777 == 0o600

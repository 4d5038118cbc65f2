"""One contestant in a process of its own: python benchmarks/turn.py CONTESTANT '{"workload": ..., "options": ...}'

A contestant is a module with ``run(workload, turn, **options)`` that calls ``turn()`` before every round. There it
waits until the driver says "go"; the answer, at the next turn, is what the round has taken.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from process import cpu_seconds
from workloads import Workload

PACKAGES = ("torch", "pytorch-lightning", "lightning-fed", "flwr", "ray", "pfl", "fedlab", "fedjax", "jax", "numpy")


class Turn:
    """The contestant's line to the driver; whatever else it prints goes to standard error."""

    def __init__(self) -> None:
        self.line = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.began: tuple[float, float] | None = None

    def __call__(self) -> None:
        if self.began is None:
            self.say({"ready": True, "versions": versions()})
        else:
            self.say({"wall": time.perf_counter() - self.began[0], "cpu": cpu_seconds() - self.began[1]})
        if sys.stdin.readline().strip() != "go":
            os._exit(0)
        self.began = time.perf_counter(), cpu_seconds()

    def say(self, facts: dict[str, Any]) -> None:
        self.line.write(json.dumps(facts) + "\n")


def versions() -> dict[str, str]:
    """Of the packages that this contestant has loaded."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        if package.replace("-", "_") in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
    return found


def main() -> None:
    name, task = sys.argv[1], json.loads(sys.argv[2])
    turn = Turn()
    importlib.import_module(f"contestants.{name}").run(Workload(**task["workload"]), turn, **task["options"])


if __name__ == "__main__":
    main()

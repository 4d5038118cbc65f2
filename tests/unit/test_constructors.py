"""Constructors stay small: no class but FederatedServer takes more than eight arguments."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import lightning_fed
from lightning_fed import FederatedServer, datamodules, models

MOST = 8


def classes() -> Iterator[type]:
    """The classes of the package that have a constructor of their own."""
    for package in (lightning_fed, datamodules, models):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.rsplit(".", 1)[-1].startswith("_"):
                continue  # extensions in C
            try:
                module = import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "flwr":  # of the extra `flower`
                    raise
                continue
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == found.name and "__init__" in vars(kind):
                    yield kind


def test_no_constructor_but_the_servers_takes_more_than_eight_arguments() -> None:
    counts = {kind: len(inspect.signature(kind.__init__).parameters) - 1 for kind in classes()}
    assert len(counts) > 100
    assert {kind for kind, count in counts.items() if count > MOST} == {FederatedServer}

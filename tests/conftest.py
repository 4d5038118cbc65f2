"""Every test runs in its own folder, offline, on one thread, with nothing left in the environment.

``LIGHTNING_FED_PACKAGE=lightning`` runs the suite with that package in the place of ``pytorch_lightning``.

What is compiled and converted in a run is kept for the whole of it, in a folder of pytest's that all processes share.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # bf16 matmul dies on some virtual machines without it
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # or old versions report errors of tests to a server
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("LIGHTNING_FED_PACKAGE", "pytorch_lightning")  # which is what tests import

import logging
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if os.environ["LIGHTNING_FED_PACKAGE"] == "lightning":
    alias = Path(__file__).parent / "helpers" / "as_lightning"
    runpy.run_path(str(alias / "sitecustomize.py"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(alias), *filter(None, [os.environ.get("PYTHONPATH")])])

torch.set_num_threads(1)
LOGGERS = [
    logging.getLogger(name)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")
]
for logger in LOGGERS[:2]:
    logger.setLevel(logging.ERROR)

PRIVATE = ("WANDB_API_KEY", "NETRC", "PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@pytest.fixture(scope="session")
def run_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a run of tests: the same folder in every process of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"


@pytest.fixture
def own_cache(tmp_path: Path, _clean_surroundings: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that only this test has: for tests of the cache itself."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_FED_CACHE", str(cache))
    return cache


@pytest.fixture(autouse=True)
def _clean_surroundings(tmp_path: Path, run_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in PRIVATE:
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LIGHTNING_FED_CACHE", str(run_cache))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    levels = [logger.level for logger in LOGGERS]
    yield
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        wandb.finish()  # a test that failed has left its run open, and the next one would log to it
    for logger, level in zip(LOGGERS, levels, strict=True):  # commands silence Lightning for the rest of the process
        logger.setLevel(level)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    for name in PRIVATE:
        os.environ.pop(name, None)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are forked during a test."""
    fork, pids = os.fork, list[int]()

    def noting() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noting)
    return pids

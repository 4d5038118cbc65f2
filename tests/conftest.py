"""Every test runs in its own folder, offline, on one thread, with nothing left in the environment."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # bf16 matmul dies on some virtual machines without it
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MPLBACKEND", "agg")

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

PRIVATE = ("WANDB_API_KEY", "NETRC", "PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@pytest.fixture(autouse=True)
def _clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in PRIVATE:
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LIGHTNING_FED_CACHE", str(tmp_path / "cache"))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
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

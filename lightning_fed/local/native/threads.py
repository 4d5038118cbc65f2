"""Run C functions, which need no interpreter lock, on as many threads as torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def spread(work: Callable[[int, int], None], size: int, share: int = 1, least: int = 1) -> None:
    """Split work into multiples of ``share`` for torch's threads, at ``least`` so many; results do not depend on it."""
    threads = max(least, torch.get_num_threads())
    part = -(-size // (threads * share)) * share
    if part >= size:
        return work(0, size)
    parts = [(first, min(first + part, size)) for first in range(0, size, part)]
    doing = [_pool(os.getpid(), threads).submit(work, *part) for part in parts]
    try:
        for each in doing:
            each.result()
    finally:
        wait(doing)  # after an interrupt too: threads still write into memory that the caller would free


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads by process, because a forked child does not have the threads of its parent."""
    return ThreadPoolExecutor(threads)

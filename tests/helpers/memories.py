"""Memories of clients to keep on disk, and processes that are killed while they write."""

import os
import signal
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.memory import Cost, Memory
from lightning_fed.store import durable


@dataclass(frozen=True)
class State:
    x_i: Tensor
    z_i: Tensor


def fresh():
    return State(torch.zeros(5), torch.zeros(5))


def large():
    return State(torch.zeros(2**18), torch.zeros(3))


def memory(seed, like=fresh, **facts):
    generator = torch.Generator().manual_seed(seed)
    state = State(*(torch.randn(t.shape, generator=generator) for t in vars(like()).values()))
    facts.setdefault("visits", seed)
    return Memory(state, buffers={"mean": torch.full((2,), float(seed))}, cost=Cost(seed, 2, 3, 4), **facts)


def content(store):
    """Everything a store tells of its clients, comparable."""
    return {cid: plain(store[cid]) for cid in store}


def plain(memory):
    tensors = {**vars(memory.state), **memory.buffers}
    return memory.visits, memory.cost, memory.layout, {n: (t.dtype, t.shape, t.tolist()) for n, t in tensors.items()}


def files(store):
    return sorted(p.name for p in (store.folder / "records").iterdir())


class Kill:
    """Kills the process at its ``at``-th durability point."""

    def __init__(self, at):
        self.left = at

    def __call__(self, name):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(at, action):
    """Run an action in a child that is killed at its ``at``-th durability point; False if the action ends before."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            durable.point = Kill(at)
            action()
            status = 0
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), "the action failed in the child"
    return code != 0

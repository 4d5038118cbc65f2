"""Failures that callbacks such as ``Faults`` ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from lightning_fed.core.failures import DROPPED, NOT_FINITE, RAISED, TOO_FAR, Failure, Fault, FaultError
from lightning_fed.core.memory import ClientId
from lightning_fed.core.problem import Solution
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import listening


def place(round: int, cid: ClientId | None = None) -> str:
    """A round, and a client of it, for the beginning of messages.

    >>> place(3, "c1"), place(-1)
    ("round 3, client 'c1'", 'full start')
    """
    return ("full start" if round < 0 else f"round {round}") + ("" if cid is None else f", client {cid!r}")


def faults_of(trainer: pl.Trainer, round: int, cohort: Sequence[ClientId]) -> dict[ClientId, Fault]:
    """How callbacks want clients of a cohort to fail; a client that is to drop out does nothing else."""
    found: dict[ClientId, Fault] = {}
    for callback in listening(trainer, "fault"):
        for cid in cohort:
            fault = callback.fault(trainer, trainer.lightning_module, round, cid)
            if fault is not None and (cid not in found or fault.kind == DROPPED):
                found[cid] = replace(fault, by=type(callback).__name__)
    return found


def dropped_out(round: int, faults: Mapping[ClientId, Fault]) -> dict[ClientId, Failure]:
    """The clients that are to drop out."""
    return {
        cid: Failure(DROPPED, f"{place(round, cid)}: {fault.by} has it drop out.", sent=False, injected=True)
        for cid, fault in faults.items()
        if fault.kind == DROPPED
    }


def spoiled(solution: Solution, fault: Fault, x_bar: Tensor, rng: Generator) -> Solution:
    """A client's solution as a fault leaves it; the client's state and message are computed from it as from any other.

    >>> at = Solution(torch.zeros(4), steps=2)
    >>> far = spoiled(at, Fault("too far", 3.0), torch.ones(4), Generator().manual_seed(0))
    >>> round(float((far.x - torch.ones(4)).norm()), 5)
    3.0
    """
    if fault.kind == RAISED:
        raise FaultError(f"{fault.by} has its training raise.")
    if fault.kind not in (NOT_FINITE, TOO_FAR) or not solution.steps:
        return solution
    size = float(fault.size or 0)
    if fault.kind == NOT_FINITE:
        return replace(solution, x=torch.full_like(x_bar, size))
    direction = torch.randn(x_bar.shape, dtype=torch.float64, generator=rng)
    return replace(solution, x=x_bar + (size / direction.norm() * direction).to(x_bar))

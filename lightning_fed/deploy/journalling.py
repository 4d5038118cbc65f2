"""Write every committed round of a fit into the server's journal."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from torch import Tensor

from lightning_fed.core.records import leaves_of
from lightning_fed.deploy.journal import Journal
from lightning_fed.deploy.remote import DeployedServer
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import FederatedCallback, RoundReport


class Journalling(FederatedCallback):
    """After each round writes a sealed checkpoint, then the round's line: from then on the round has happened.

    Nodes learn of it with the next instruction, which is sent later. So a server that is killed at any point resumes
    from its last line, and nodes follow.
    """

    reads_module = False

    def __init__(self, journal: Journal, server: DeployedServer) -> None:
        self.journal, self.server = journal, server

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        federation, journal = self.server.federation, self.journal
        assert federation is not None
        trainer.save_checkpoint(journal.checkpoint_for(report.round))
        facts: dict[str, Any] = {"cohort": report.cohort, "failed": list(report.failures)}
        facts |= {"x_bar": digest_of_tensor(federation.server.x_bar), "server": digest_of_record(federation.server)}
        facts["metrics"] = {name: value for name, value in report.metrics.items() if value == value}
        journal.commit(report.round, facts)


def digest_of_tensor(tensor: Tensor) -> str:
    """A checksum of a tensor's bits.

    >>> import torch
    >>> digest_of_tensor(torch.zeros(2))[:8]
    'af5570f5'
    """
    return sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def digest_of_record(record: object) -> str:
    """A checksum of the bits of all tensors of a record."""
    return sha256("".join(map(digest_of_tensor, leaves_of(record))).encode()).hexdigest()

"""An error in a user's step surfaces as that error, with round and client, whatever engine trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.engines import ClientError

ENGINES: dict[str, dict[str, Any]] = {
    "one by one": {"engine": "sequential"},
    "workers": {"engine": "sequential", "workers": 2},
    "stacked": {"engine": "vectorized", "compile": False},
    "in C": {"engine": "vectorized", "compile": True},
}


class Fails(Net):
    """Looks up what is not there."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return {"known": super().training_step(batch, batch_idx)}["unknown"]


class FailsOnNegative(Net):
    """Takes labels for granted that one client does not have."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return torch.nn.functional.nll_loss(self(batch[0]).log_softmax(1), batch[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_every_step_names_round_and_client(engine: str) -> None:
    server = FederatedServer(FedADMM(), local_steps=2, seed=1, **ENGINES[engine])
    with pytest.raises(ClientError, match=r"round 0, client 'c0': KeyError: 'unknown'"):
        quiet_trainer(server, 2).fit(Fails(), datamodule=classification(3, drop_last=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_the_steps_of_one_client_names_it(engine: str) -> None:
    data = classification(3, drop_last=True)
    data.setup("fit")
    data.client_dataset("c1").tensors[1].fill_(99)
    server = FederatedServer(FedADMM(), local_steps=2, seed=1, **ENGINES[engine])
    with pytest.raises(ClientError, match=r"round 0, client 'c1': \w+: .*(99|bounds|range)"):
        quiet_trainer(server, 2).fit(FailsOnNegative(), datamodule=data)

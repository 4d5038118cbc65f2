"""Dual and server steps that a run's sampling and weights may not bear are warned of before the first round."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.modules import Net, quiet_trainer
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Compressed, FedADMM, FedAvg, FedDyn, FedPrimalDual
from lightning_fed.sampling import Systematic
from lightning_fed.trainer.checks import check_setup
from lightning_fed.transforms import Quantize

#: 30 clients of which one has a quarter of the samples.
SIZES = [29] + 29 * [3]


@pytest.fixture(scope="module")
def data() -> FederatedDataModule:
    def client(n: int) -> TensorDataset:
        return TensorDataset(torch.ones(n, 6), torch.zeros(n, dtype=torch.long))

    return FederatedDataModule({f"c{i}": client(n) for i, n in enumerate(SIZES)}, batch_size=3)


def set_up(data: FederatedDataModule, algorithm: Any, **kwargs: Any) -> list[str]:
    """The warnings of the checks before a fit."""
    server = FederatedServer(algorithm, local_steps=1, evaluate_every=0, **kwargs)
    trainer, module = quiet_trainer(server, rounds=1), Net()
    trainer.datamodule = data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_setup(trainer, module, algorithm, server.sampler, server.local_work)
    return [str(warning.message) for warning in caught]


def test_a_heavy_client_that_is_seldom_drawn_is_warned_of_by_a_fit(data: FederatedDataModule) -> None:
    server = FederatedServer(FedPrimalDual(weights="samples"), clients_per_round=1, local_steps=1, evaluate_every=0)
    with pytest.warns(UserWarning, match="may diverge") as caught:
        quiet_trainer(server, rounds=1).fit(Net(), datamodule=data)
    text = str(caught[0].message)
    for words in (
        "FedPrimalDual may diverge with ab = dual step * server step = 0.3",
        "client 'c0' has 0.25 of the weight and is drawn with probability 0.0333",
        "ab should be at most 0.0678, half of the limit 0.136",
        "b at most 0.678",
        "Systematic(size, weights), for ab up to 0.507",
        'weights="uniform", for ab up to 0.508',
        "docs/primal_dual.md",
    ):
        assert words in text


@pytest.mark.parametrize(
    "algorithm",
    [
        FedPrimalDual(b=3.0, weights="samples"),
        FedPrimalDual(b=5.0, weights="samples"),
        Compressed(FedPrimalDual(weights="samples"), Quantize(64)),
        FedDyn(),
        FedADMM(eta=0.3, mean="active"),
        FedADMM(weights="samples"),
        FedAvg(),
    ],
    ids=repr,
)
def test_ten_of_thirty_are_not_warned_of(data: FederatedDataModule, algorithm: Any) -> None:
    assert set_up(data, algorithm, clients_per_round=10) == []


@pytest.mark.parametrize(
    "algorithm", [FedDyn(), FedADMM(mean="active"), FedADMM(mean="active", eta="auto"), FedPrimalDual()], ids=repr
)
def test_equal_weights_are_not_warned_of_with_one_client_per_round(data: FederatedDataModule, algorithm: Any) -> None:
    assert set_up(data, algorithm, clients_per_round=1) == []


@pytest.mark.parametrize(
    "algorithm",
    [
        FedADMM(mean="active", weights="samples"),
        FedADMM(mean="active", weights="samples", eta="auto"),
        FedPrimalDual(rho=0.3, sigma=0.3, lam=1 / 0.3, weights="samples"),
        Compressed(FedADMM(mean="active", weights="samples"), Quantize(64)),
    ],
    ids=repr,
)
def test_the_line_of_one_penalty_has_ab_1(data: FederatedDataModule, algorithm: Any) -> None:
    (text,) = set_up(data, algorithm, clients_per_round=10)
    assert "ab = dual step * server step = 1:" in text
    assert "sigma * lam of FedPrimalDual at most 0.68," in text


def test_the_cures_that_are_named_cure(data: FederatedDataModule) -> None:
    assert set_up(data, FedPrimalDual(b=0.67, weights="samples"), clients_per_round=1) == []
    assert set_up(data, FedPrimalDual(weights="samples"), sampler=Systematic(1, SIZES)) == []
    assert set_up(data, FedPrimalDual(), clients_per_round=1) == []


def test_steps_that_fail_with_everybody_are_warned_of(data: FederatedDataModule) -> None:
    (text,) = set_up(data, FedPrimalDual(a=0.1, b=19.0))
    assert "ab must be below 2 (1 - a) = 1.8, even if everybody takes part" in text
    assert set_up(data, FedPrimalDual(a=0.1, b=17.0)) == []

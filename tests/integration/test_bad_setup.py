"""What a federated fit refuses, or warns of: clearly, and before the first local step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR, FedProx
from lightning_fed.engines.sequential import ClientError
from lightning_fed.sampling import Bernoulli, Sampler, Uniform


class Counted(Net):
    """Counts its training steps."""

    steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def refuse(
    error: type[BaseException],
    *words: str,
    trainer: pl.Trainer | None = None,
    module: Any = None,
    **fit: Any,
) -> None:
    """The fit must fail with an error that says these words, and before any training step."""
    module = Counted() if module is None else module
    trainer = trainer or quiet_trainer(FedADMM())
    with pytest.raises(error) as caught:
        trainer.fit(module, **(fit or {"datamodule": classification()}))
    says(caught.value, *words)
    assert getattr(module, "steps", 0) == 0


def says(error: BaseException, *words: str) -> None:
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


# -- hyper-parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
@pytest.mark.parametrize("name", ["local_steps", "local_epochs"])
def test_local_work_must_be_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"FederatedServer\.{name} .* whole number >= 1, got {re.escape(repr(value))}"
    ):
        FederatedServer(FedADMM(), **{name: value})


@pytest.mark.parametrize("value", [0, -2, 2.0, "2", True])
def test_clients_per_round_must_be_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"clients_per_round .* whole number >= 1, got {re.escape(repr(value))}"):
        FederatedServer(FedADMM(), clients_per_round=value)


@pytest.mark.parametrize("value", ["uniform", 3, 0, Uniform])
def test_a_sampler_must_be_one(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"FederatedServer\.sampler .*Sampler.*got {re.escape(repr(value))}"):
        FederatedServer(FedADMM(), sampler=value)


@pytest.mark.parametrize("value", [-1, 0.5, "never", True])
def test_evaluate_every_must_be_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FederatedServer\.evaluate_every .*>= 0, got {re.escape(repr(value))}"):
        FederatedServer(FedADMM(), evaluate_every=value)


@pytest.mark.parametrize("value", [-1, 0.5, "now", True])
def test_the_seed_must_be_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FederatedServer\.seed .*>= 0, got {re.escape(repr(value))}"):
        FederatedServer(FedADMM(), seed=value)


@pytest.mark.parametrize("value", ["mean", "", None, 1])
def test_the_buffer_policy_must_be_known(value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"buffers must be one of average, server, local; got {re.escape(repr(value))}"
    ):
        FederatedServer(FedADMM(), buffers=value)


@pytest.mark.parametrize("value", ["FedADMM", FedADMM, None, 1.0])
def test_the_algorithm_must_be_one(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"FederatedServer\.algorithm .*FedADMM\(\), got {re.escape(repr(value))}"):
        FederatedServer(value)


def test_one_may_not_say_twice_who_takes_part_or_how_long() -> None:
    with pytest.raises(ValueError, match="either clients_per_round or sampler"):
        FederatedServer(FedADMM(), clients_per_round=2, sampler=Uniform(2))
    with pytest.raises(ValueError, match="either local_steps or local_epochs"):
        FederatedServer(FedADMM(), local_steps=2, local_epochs=2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: FedADMM(eta=0), ["FedADMM.eta", "positive", "got 0"]),
        (lambda: FedADMM(eta=float("nan")), ["FedADMM.eta", "positive", "got nan"]),
        (lambda: FedADMM(alpha=2.5), ["FedADMM.alpha", "at most 2", "got 2.5"]),
        (lambda: FedADMM(weights="equal"), ["FedADMM.weights", "uniform, samples", "got 'equal'"]),
        (lambda: FedADMM(start="zero"), ["FedADMM.start", "local, server, centre", "got 'zero'"]),
        (lambda: FedDR(eta_hat=-1), ["FedDR.eta_hat", "positive", "got -1"]),
        (lambda: FedDR(init="x1"), ["FedDR.init", "x0, prox", "got 'x1'"]),
        (lambda: FedAvg(server_lr=0), ["FedAvg.server_lr", "positive", "got 0"]),
        (lambda: FedProx(mu=-0.1), ["FedProx.mu", "non-negative", "got -0.1"]),
    ],
)
def test_an_algorithms_hyper_parameters_are_checked_when_it_is_made(build: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        build()
    says(caught.value, *words)


# -- data ---------------------------------------------------------------------------------------------------------


def test_an_unknown_client_is_named() -> None:
    with pytest.raises(ValueError, match=r"Unknown client 'nobody'.*4 clients: 'c0', 'c1', 'c2'"):
        classification().client_dataset("nobody")


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
def test_data_must_be_split_by_client() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)), batch_size=4)
    refuse(TypeError, "got no datamodule", "datamodule=FederatedDataModule(...)", train_dataloaders=loader)

    class Central(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

    refuse(TypeError, "got Central", "FederatedDataModule.from_dataset", datamodule=Central())


class Emptied(FederatedDataModule):
    """Says that it has samples when it is made, and has none."""

    def num_examples(self, cid: Any) -> int:
        return 0 if cid == "c1" else super().num_examples(cid)


def test_a_client_without_samples_is_named() -> None:
    with pytest.raises(ValueError, match=r"Client 'b' has no train samples.*Leave it out"):
        FederatedDataModule({"a": TensorDataset(torch.zeros(2, 1)), "b": TensorDataset(torch.zeros(0, 1))})
    data = Emptied(classification().splits["train"])
    refuse(ValueError, "Client 'c1' has no training samples", "Leave it out", datamodule=data)


def test_a_client_whose_loader_is_empty_is_an_error_and_not_an_endless_loop() -> None:
    class NoBatches(FederatedDataModule):
        asked = 0

        def client_dataloader(self, cid: Any, generator: Any = None, **kwargs: Any) -> Any:
            self.asked += 1
            assert self.asked < 20, "asks an empty client for batches for ever"
            return []

    data = NoBatches(classification(2).splits["train"])
    server = FederatedServer(FedADMM(), local_steps=3, evaluate_every=0)
    with pytest.raises(ClientError, match=r"round 0, client 'c0'") as caught:
        quiet_trainer(server, limit_val_batches=0).fit(Counted(), datamodule=data)
    assert "asks an empty client" not in str(caught.value)


def test_more_clients_per_round_than_there_are_is_refused() -> None:
    trainer = quiet_trainer(FederatedServer(FedADMM(), clients_per_round=5))
    refuse(ValueError, "Cannot draw 5 clients per round", "the federation has 4", "at most 4", trainer=trainer)


def test_a_sampling_that_does_not_fit_the_clients_is_refused() -> None:
    trainer = quiet_trainer(FederatedServer(FedADMM(), sampler=Bernoulli([0.5, 0.5])))
    refuse(ValueError, "Bernoulli.p has 2 probabilities for 4 clients", "one per client", trainer=trainer)

    class First(Sampler):
        def inclusion_probabilities(self, n: int) -> Any:
            return np.eye(n)[0]

        def draw(self, n: int, rng: Any) -> list[int]:
            return [0]

    trainer = quiet_trainer(FederatedServer(FedADMM(), sampler=First()))
    refuse(ValueError, "never draws client 1 of 4", "not a proper sampling", trainer=trainer)


# -- module -------------------------------------------------------------------------------------------------------


class Nothing(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...


def test_a_module_without_parameters_is_refused() -> None:
    refuse(ValueError, "Nothing has no trainable parameters", "requires_grad=True", module=Nothing())


def test_a_module_whose_parameters_are_all_frozen_is_refused() -> None:
    module = Counted()
    module.requires_grad_(False)
    refuse(ValueError, "Counted has no trainable parameters", "requires_grad=True", module=module)


def test_parameters_without_a_shape_are_refused() -> None:
    class Lazy(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LazyLinear(3)

    trainer = quiet_trainer(FedADMM(), limit_val_batches=0)  # a sanity check would give them their shape
    refuse(ValueError, "Lazy.net.weight has no shape yet", "forward pass", trainer=trainer, module=Lazy())


def test_complex_parameters_are_refused() -> None:
    class Complex(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    refuse(ValueError, "Complex.phase is not real floating point", module=Complex())


def test_a_module_without_training_step_is_refused() -> None:
    class NoStep(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    refuse(Exception, "training_step", module=NoStep())


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")  # Lightning's, before ours
def test_a_dataloader_iter_is_refused() -> None:
    class Iterates(Counted):
        def training_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
            self.steps += 1

    refuse(ValueError, "Iterates.training_step takes a dataloader_iter", "batch, batch_idx", module=Iterates())


class Sparse(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 1, sparse=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.embed(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_are_refused_before_they_are_stepped_along() -> None:
    module, data = Sparse(), FederatedDataModule([TensorDataset(torch.arange(9))])
    before = module.embed.weight.detach().clone()
    with pytest.raises(ClientError, match=r"round 0, client 0: TypeError: Sparse gradients.*sparse=False") as caught:
        quiet_trainer(FedADMM()).fit(module, datamodule=data)
    assert isinstance(caught.value.__cause__, TypeError)
    assert torch.equal(module.embed.weight, before)
    quiet_trainer(FedAvg()).fit(module, datamodule=data)  # no penalty, nothing in the way
    assert module.embed.weight.norm() < before.norm()

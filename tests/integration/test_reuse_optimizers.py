"""Optimisers with their own ways, groups of parameters, tied weights: each visit starts without memory of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import classification, quiet_trainer, x_of
from helpers.reuse import SEED, Visits, alone, assert_same, plainly_trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.callbacks import FederatedCallback

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.2),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.05),
    "fused adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.05, fused=True),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.02, momentum=0.5),
    "lr in a tensor": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.05)),
    "lbfgs": lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3),
    "two groups": lambda net: torch.optim.SGD(
        [{"params": net[0].parameters(), "lr": 0.05}, {"params": net[2].parameters(), "weight_decay": 0.1}], lr=0.3
    ),
}


class Trained(pl.LightningModule):
    def __init__(self, name: str = "sgd") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.name = name

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.name](self.net)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_lone_client_trains_bitwise_as_a_plain_trainer_does(name: str) -> None:
    data = alone(classification(4), "c3")
    plain = plainly_trained(Trained(name), data, "c3", rounds=1)
    visits = Visits()
    server = FederatedServer(FedAvg(), seed=SEED, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[visits]).fit(Trained(name), datamodule=data)
    assert_same(visits.ends[0][2], plain)


def test_a_lone_client_follows_sgd_for_many_rounds() -> None:
    """FedAvg of one client with a step that remembers nothing is plain training, round after round."""
    data = alone(classification(4), "c2")
    plain = plainly_trained(Trained(), data, "c2", rounds=6, precision="64-true")
    module = Trained()
    quiet_trainer(FederatedServer(FedAvg(), seed=SEED), 6, precision="64-true").fit(module, datamodule=data)
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float64
        assert torch.allclose(value, plain[name], atol=1e-12, rtol=0), name


class Memories(FederatedCallback):
    """What the optimiser remembers when a visit's first gradient comes."""

    def __init__(self) -> None:
        self.at_start: list[Any] = []
        self._new = False

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        self._new = True

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if self._new and trainer.training:
            self._new = False
            state = optimizer.state_dict()["state"]
            if "func_evals" not in state.get(0, {}):  # L-BFGS counts its evaluations before the closure
                self.at_start.append(copy.deepcopy(state))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lbfgs"])
def test_every_visit_starts_with_the_optimiser_as_it_was_built(name: str) -> None:
    memories, module = Memories(), Trained(name)
    built = copy.deepcopy(OPTIMIZERS[name](module.net).state_dict()["state"])
    server = FederatedServer(FedADMM(eta=0.5), clients_per_round=2, local_steps=4, seed=SEED)
    trainer = quiet_trainer(server, 3, callbacks=[memories])
    trainer.fit(module, datamodule=classification(4))
    assert len(memories.at_start) == 6
    for found in [*memories.at_start, trainer.optimizers[0].state_dict()["state"]]:
        assert found.keys() == built.keys()
        for index, entry in built.items():
            assert found[index].keys() == entry.keys()
            assert all(torch.equal(torch.as_tensor(found[index][k]), torch.as_tensor(v)) for k, v in entry.items())
    assert bool(built) == (name == "adagrad")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_federation_learns_with_it(name: str) -> None:
    data, module = classification(4, batch_size=20 if name == "lbfgs" else 4), Trained(name)
    x, y = (torch.cat([data.client_dataset(cid).tensors[j] for cid in data.client_ids]) for j in (0, 1))
    before = module.training_step([x, y], 0).item()
    server = FederatedServer(FedADMM(eta=0.5), local_epochs=3, seed=SEED, evaluate_every=0)
    quiet_trainer(server, 6).fit(module, datamodule=data)
    assert module.training_step([x, y], 0).item() < 0.8 * before


def test_the_order_of_clients_does_not_matter() -> None:
    """Nothing of one client's visit reaches the next one's: alone in its round, each ends up at the same point."""
    for name in ("momentum", "adam", "adagrad", "lbfgs"):
        data, visits = classification(3, batch_size=20), Visits()
        server = FederatedServer(FedADMM(eta=0.5), local_steps=3, seed=SEED, evaluate_every=0, engine="sequential")
        quiet_trainer(server, 1, callbacks=[visits]).fit(Trained(name), datamodule=data)
        for _, cid, end in visits.ends:
            single = Visits()
            server = FederatedServer(FedADMM(eta=0.5), local_steps=3, seed=SEED, evaluate_every=0)
            quiet_trainer(server, 1, callbacks=[single]).fit(Trained(name), datamodule=alone(data, cid))
            assert_same(single.ends[0][2], end)


# -- tied weights -------------------------------------------------------------------------------------------------


class Tied(pl.LightningModule):
    """A language model whose decoder is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.mix, self.decode = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.decode.weight = self.embed.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0]
        logits = self.decode(self.mix(self.embed(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def texts() -> FederatedDataModule:
    """Every token is followed by the next one, a stretch of the alphabet per client."""
    stretches = [(torch.arange(4) + torch.arange(6)[:, None] + i) % 7 for i in range(3)]
    return FederatedDataModule([TensorDataset(t) for t in stretches], batch_size=3)


def test_tied_weights_are_one_variable_and_stay_tied() -> None:
    module, visits = Tied(), Visits()
    server = FederatedServer(FedADMM(eta=0.5), local_epochs=4, seed=SEED)
    quiet_trainer(server, 8, callbacks=[visits]).fit(module, datamodule=texts())
    assert module.decode.weight is module.embed.weight
    assert server.federation.layout.names == ("embed.weight", "mix.weight", "mix.bias")
    assert server.federation.x0.numel() == 7 * 4 + 4 * 4 + 4
    assert torch.equal(x_of(module), server.federation.server.x_bar)
    assert visits.losses[-1] < 0.7 * visits.losses[0]


class SavesInside(FederatedCallback):
    """Saves a checkpoint in the middle of the second client's visit."""

    def __init__(self, weights_only: bool) -> None:
        self.weights_only, self.seen = weights_only, 0

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: Any) -> None:
        self.server = {name: t.clone() for name, t in module.state_dict().items()}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.seen += 1
        if self.seen == 7:
            self.client = {name: t.clone() for name, t in module.state_dict().items()}
            trainer.save_checkpoint("inside.ckpt", weights_only=self.weights_only)
            trainer.should_stop = True


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", [Tied, Trained])
def test_a_checkpoint_taken_inside_a_visit_holds_the_servers_weights(kind: Any, weights_only: bool) -> None:
    saves = SavesInside(weights_only)
    data = texts() if kind is Tied else classification(3)
    server = FederatedServer(FedADMM(eta=0.5), local_steps=4, seed=SEED, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[saves]).fit(kind(), datamodule=data)
    saved = torch.load("inside.ckpt", weights_only=False)["state_dict"]
    assert not torch.equal(next(iter(saves.client.values())), next(iter(saves.server.values())))
    assert_same(saved, saves.server)

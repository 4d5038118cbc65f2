"""Models that were written without knowing of federations train federatedly, unmodified."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchvision
from helpers.drawn import batches
from helpers.modules import quiet_trainer, x_of
from helpers.reuse import SEED, Visits, alone, assert_same, plainly_trained
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg

# -- torchvision ------------------------------------------------------------------------------------------------


class Vision(pl.LightningModule):
    def __init__(self, name: str = "mobilenet_v3_small", lr: float = 0.05) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = getattr(torchvision.models, name)(num_classes=3)
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def images() -> FederatedDataModule:
    """Two clients, of 8 and 4 pictures whose colour tells their class."""
    g = torch.Generator().manual_seed(0)
    clients = {}
    for cid, n in {"eight": 8, "four": 4}.items():
        y = torch.arange(n) % 3
        x = 0.3 * torch.randn(n, 3, 32, 32, generator=g)
        x[torch.arange(n), y] += 1.0
        clients[cid] = TensorDataset(x, y)
    return FederatedDataModule(clients, batch_size=4)


class Listens(pl.Callback):
    """So that Lightning's own loop makes the steps, and not ours for large models, which round otherwise."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


@pytest.mark.parametrize("others", [[Listens()], []], ids=["bitwise", "fused"])
def test_a_lone_client_trains_a_torchvision_model_as_a_plain_trainer_does(others: list[pl.Callback]) -> None:
    data = alone(images(), "eight")
    plain = plainly_trained(Vision(), data, "eight", rounds=1)
    visits, module = Visits(), Vision()
    server = FederatedServer(FedAvg(), seed=SEED, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[visits, *others]).fit(module, datamodule=data)
    if others:
        assert_same(visits.ends[0][2], plain)
    for name, value in module.state_dict().items():
        assert torch.allclose(value, plain[name], atol=1e-6), name  # x_bar + (x_i - x_bar) rounds once more


@pytest.mark.parametrize("algorithm", [FedAvg(), FedADMM(eta=1.0)], ids=["FedAvg", "FedADMM"])
def test_a_torchvision_model_learns(algorithm: Any) -> None:
    visits, module = Visits(), Vision("shufflenet_v2_x0_5", lr=0.01)  # longer steps jump, on some machines upwards
    server = FederatedServer(algorithm, seed=SEED, local_steps=2, evaluate_every=0)
    quiet_trainer(server, 10, callbacks=[visits]).fit(module, datamodule=images())
    late = median(visits.losses[-5:])  # a network whose batches of few images are normalised magnifies any rounding
    assert late < 0.8 * visits.losses[0]


class Starts(Visits):
    """Also what buffers every visit started from."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.begun: dict[tuple[int, Any], dict[str, Tensor]] = {}
        self._now: tuple[int, Any] | None = None
        module.register_forward_pre_hook(self._look)

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        self._now = (visit.round, visit.client)

    def _look(self, module: nn.Module, *_: Any) -> None:
        if self._now is not None:
            self.begun[self._now] = {name: b.clone() for name, b in module.named_buffers()}
            self._now = None


@pytest.mark.parametrize("policy", ["average", "server", "local"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedADMM(eta=1.0)], ids=["FedAvg", "FedADMM"])
def test_batchnorm_statistics_follow_the_policy(policy: Any, algorithm: Any) -> None:
    data, module = images(), Vision()
    initial = {name: b.clone() for name, b in module.named_buffers()}
    watch = Starts(module.model)
    server = FederatedServer(algorithm, seed=SEED, buffers=policy, evaluate_every=0)
    quiet_trainer(server, 2, callbacks=[watch]).fit(module, datamodule=data)

    ends = {(k, cid): state for k, cid, state in watch.ends}
    weights = {"eight": 8, "four": 4} if isinstance(algorithm, FedAvg) else {"eight": 1, "four": 1}
    now = dict(module.named_buffers())
    assert len(ends) == 4
    for name, first in initial.items():
        inner, own = name.removeprefix("model."), {key: end[name] for key, end in ends.items()}
        merged = [first]
        for k in (0, 1):
            parts = [(w, own[k, cid]) for cid, w in weights.items()]
            mean = sum(w * b.double() for w, b in parts) / sum(weights.values())
            merged.append(mean.to(first) if first.is_floating_point() else torch.maximum(*(b for _, b in parts)))
        begun = {key: buffers[inner] for key, buffers in watch.begun.items()}
        for cid in weights:
            assert torch.equal(begun[0, cid], first)
            expected = {"average": merged[1], "server": first, "local": own[0, cid]}[policy]
            assert torch.allclose(begun[1, cid], expected, atol=1e-6, rtol=1e-6), name
            if policy == "local":
                assert torch.equal(begun[1, cid], own[0, cid])
                assert torch.equal(server.federation.store[cid].buffers[name], own[1, cid])
            else:
                assert not server.federation.store[cid].buffers
        expected = merged[2] if policy == "average" else first
        assert torch.allclose(now[name], expected, atol=1e-6, rtol=1e-6), name
    steps = "model.features.0.1.num_batches_tracked"
    assert int(now[steps]) == (4 if policy == "average" else 0)  # two rounds of at most two batches
    assert int(ends[1, "four"][steps]) == {"average": 2 + 1, "server": 1, "local": 1 + 1}[policy]


# -- a GAN --------------------------------------------------------------------------------------------------------


def bce(logits: Tensor, truth: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


class GAN(pl.LightningModule):
    """Two optimisers, toggled by hand; it has no validation and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
            self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        noise = torch.randn_like(real)
        opt_g, opt_d = self.optimizers()

        self.toggle_optimizer(opt_g)
        g_loss = bce(self.discriminator(self(noise)), 1.0)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_loss = bce(self.discriminator(real), 1.0) + bce(self.discriminator(self(noise).detach()), 0.0)
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.999))
        return [g, d], []


def points() -> FederatedDataModule:
    """Two clients who each know one half of a cloud around (3, 3)."""
    g = torch.Generator().manual_seed(0)
    clouds = [torch.tensor([x, 3.0]) + 0.3 * torch.randn(n, 2, generator=g) for x, n in ((2.5, 48), (3.5, 32))]
    return FederatedDataModule([TensorDataset(cloud) for cloud in clouds], batch_size=16)


def test_a_lone_client_trains_a_gan_bitwise_as_a_plain_trainer_does() -> None:
    data = alone(points(), 0)
    plain = plainly_trained(GAN(), data, 0, rounds=1)
    visits = Visits()
    quiet_trainer(FederatedServer(FedAvg(), seed=SEED), 1, callbacks=[visits]).fit(GAN(), datamodule=data)
    assert_same(visits.ends[0][2], plain)


def test_a_gan_learns_to_draw_what_no_client_has_alone() -> None:
    module = GAN()
    noise = torch.randn(500, 2, generator=torch.Generator().manual_seed(1))
    goal = torch.tensor([3.0, 3.0])
    before = (module(noise).mean(0) - goal).norm().item()
    algorithm = FedADMM(eta=0.1, start="local")  # from "server" a saddle point needs a penalty of about 1
    server = FederatedServer(algorithm, seed=SEED, local_epochs=2, evaluate_every=0)
    trainer = quiet_trainer(server, 30)
    trainer.fit(module, datamodule=points())
    after = (module(noise).mean(0) - goal).norm().item()
    assert after < 0.35 * before
    assert all(p.requires_grad for p in module.parameters())
    assert {"g_loss", "d_loss"} <= trainer.callback_metrics.keys()


def test_each_optimiser_of_a_gan_gets_its_own_part_of_the_augmented_gradient() -> None:
    """Three rounds of FedADMM, against the same with penalties in the two losses."""
    eta, data, module = 0.5, points(), GAN().double()
    x_bar = first = x_of(module)
    z_i, x_i, x_hat_i = (dict.fromkeys(data.client_ids, v) for v in (torch.zeros_like(first), first, first))
    split = sum(p.numel() for p in module.generator.parameters())
    g_params, d_params = list(module.generator.parameters()), list(module.discriminator.parameters())
    for k in range(3):
        for cid in data.client_ids:
            vector_to_parameters(x_i[cid].clone(), module.parameters())
            (opt_g, opt_d), _ = module.configure_optimizers()
            z, center = z_i[cid], x_bar
            for [real] in batches(data, cid, SEED, k):
                noise = torch.randn_like(real.double())
                x = parameters_to_vector(g_params)
                penalty = z[:split] @ x + eta / 2 * (x - center[:split]).square().sum()
                grads = torch.autograd.grad(bce(module.discriminator(module(noise)), 1.0) + penalty, g_params)
                step(opt_g, g_params, grads)
                x = parameters_to_vector(d_params)
                penalty = z[split:] @ x + eta / 2 * (x - center[split:]).square().sum()
                fake = bce(module.discriminator(module(noise).detach()), 0.0)
                loss = bce(module.discriminator(real.double()), 1.0) + fake
                step(opt_d, d_params, torch.autograd.grad(loss + penalty, d_params))
            x_i[cid] = x_of(module)
            z_i[cid] = z + eta * (x_i[cid] - center)
            x_hat_i[cid] = x_i[cid] + z_i[cid] / eta
        x_bar = sum(x_hat_i.values()) / len(x_hat_i)
    fitted = GAN().double()
    server = FederatedServer(FedADMM(eta=eta, start="local"), seed=SEED)
    quiet_trainer(server, 3, precision="64-true").fit(fitted, datamodule=data)
    assert torch.allclose(x_of(fitted), x_bar, atol=1e-10, rtol=0)
    assert (x_bar - first).abs().max() > 0.05


def step(optimizer: torch.optim.Optimizer, params: list[Any], grads: tuple[Tensor, ...]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    optimizer.step()

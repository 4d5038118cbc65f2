"""Metrics, schedulers, clipping, accumulation, dropout and fine-tuning work as any Lightning user writes them."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import classification, quiet_trainer
from helpers.reuse import SEED, Visits, alone, assert_same, plainly_trained
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.callbacks import FederatedCallback


class Measured(pl.LightningModule):
    """torchmetrics logged as objects, a scheduler by step and one by epoch, dropout."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.lr = lr
        self.train_acc, self.val_acc = MulticlassAccuracy(3, average="micro"), MulticlassAccuracy(3, average="micro")
        self.mean_loss = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.mean_loss.update(loss, weight=len(y))
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("mean_loss", self.mean_loss)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.val_acc.update(self.net(batch[0]), batch[1])
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "interval": "epoch"}]


class Logged(FederatedCallback):
    def __init__(self) -> None:
        self.by_round: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.by_round.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_metric_objects_count_every_sample_of_the_cohort_once(evaluate_every: int) -> None:
    """At lr 0 and without dropout the model stands still, so what a round must log is known."""
    data, module, logged = classification(4), Measured(lr=0.0, dropout=0.0), Logged()
    server = FederatedServer(FedADMM(), clients_per_round=2, seed=SEED, evaluate_every=evaluate_every)
    quiet_trainer(server, 3, callbacks=[logged]).fit(module, datamodule=data)
    for k, found in enumerate(logged.by_round):
        cohort = [data.client_ids[i] for i in server.sampler.cohort(4, SEED, k)]
        x, y = (torch.cat([data.client_dataset(cid).tensors[j] for cid in cohort]) for j in (0, 1))
        logits = module.net(x)
        accuracy = (logits.argmax(1) == y).float().mean().item()
        loss = nn.functional.cross_entropy(logits, y).item()
        assert found["train_acc"] == found["train_acc_epoch"] == pytest.approx(accuracy)
        assert found["train_loss"] == pytest.approx(loss, rel=1e-5)
        assert found["mean_loss"] == pytest.approx(loss, rel=1e-5)
        x, y = (torch.cat([data.client_dataset(cid, "test").tensors[j] for cid in data.client_ids]) for j in (0, 1))
        assert found["val_acc"] == pytest.approx((module.net(x).argmax(1) == y).float().mean().item())
    assert len(logged.by_round) == 3


class LearningRates(FederatedCallback):
    def __init__(self) -> None:
        self.by_visit: dict[tuple[int, Any], list[float]] = {}

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        self.now = self.by_visit[visit.round, visit.client] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.now.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedulers_step_by_round_and_by_local_step(accumulate: int, restart: bool) -> None:
    rates = LearningRates()
    local = {"local_steps": 6, "evaluate_every": 0, "restart_schedulers": restart}
    server = FederatedServer(FedADMM(), clients_per_round=2, seed=SEED, **local)
    trainer = quiet_trainer(server, 3, callbacks=[rates], accumulate_grad_batches=accumulate)
    trainer.fit(Measured(lr=0.1), datamodule=classification(4, batch_size=3))  # epochs of 3, 4, 4 and 4 batches
    for (k, _), seen in rates.by_visit.items():
        assert len(seen) == 6 if accumulate == 1 else len(seen) in (3, 4)
        before = 0 if restart else k * 6 // accumulate
        assert seen == pytest.approx([0.1 * 0.8**k * 0.9 ** (before + step) for step in range(len(seen))])
    assert len(rates.by_visit) == 6
    steps = 0 if restart else 3 * 6 // accumulate
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.8**3 * 0.9**steps)


SETTINGS: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")  # plain training has no use for it
def test_a_lone_client_trains_with_everything_on_bitwise_as_a_plain_trainer_does() -> None:
    data = alone(classification(4), "c3")
    plain = plainly_trained(Measured(), data, "c3", rounds=1, **SETTINGS)
    visits = Visits()
    server = FederatedServer(FedAvg(), seed=SEED)
    quiet_trainer(server, 1, callbacks=[visits], **SETTINGS).fit(Measured(), datamodule=data)
    assert_same(visits.ends[0][2], plain)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedADMM(eta=1.0)], ids=["FedAvg", "FedADMM"])
def test_a_module_with_metrics_schedulers_clipping_accumulation_and_dropout_learns(algorithm: Any) -> None:
    visits, logged = Visits(), Logged()
    server = FederatedServer(algorithm, seed=SEED, local_epochs=4, restart_schedulers=True)
    trainer = quiet_trainer(server, 8, callbacks=[visits, logged], **SETTINGS)
    trainer.fit(Measured(lr=0.5), datamodule=classification(4))
    assert visits.losses[-1] < 0.95 * visits.losses[0]
    assert logged.by_round[-1]["federated/train_loss"] < 0.9 * logged.by_round[0]["federated/train_loss"]
    assert logged.by_round[-1]["train_acc"] > logged.by_round[0]["train_acc"]


@pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`:UserWarning"
)  # Lightning may say so, in these words
def test_a_module_that_validates_may_meet_data_without_validation() -> None:
    data = FederatedDataModule(classification(3).splits["train"], batch_size=4)
    quiet_trainer(FederatedServer(FedAvg()), 1).fit(Measured(), datamodule=data)


# -- fine-tuning --------------------------------------------------------------------------------------------------


class Reader(pl.LightningModule):
    """A small transformer over tokens, with a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.1, batch_first=True)
            self.backbone = nn.Sequential(
                nn.Embedding(11, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            )
            self.head = nn.Linear(8, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, y = batch
        return nn.functional.cross_entropy(self.head(self.backbone(tokens).mean(1)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05)


class Unfreeze(BaseFinetuning):
    """Straight from Lightning's documentation: freeze the backbone, unfreeze it at epoch 1."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, initial_denom_lr=2)


def sentences(clients: int = 3) -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 11, (8 + i, 5), generator=g) for i in range(clients)]
    return FederatedDataModule([TensorDataset(t, (t[:, 0] > 5).long()) for t in tokens], batch_size=4)


class Watch(Visits):
    """The backbone at the start of every visit, and traffic and weights after every round."""

    def __init__(self, module: Reader) -> None:
        super().__init__()
        self.starts: list[tuple[int, Any, dict[str, Tensor]]] = []
        self.rounds: list[tuple[float, float, dict[str, Tensor]]] = []
        self._now: Any = None
        module.backbone.register_forward_pre_hook(self._look)

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        self._now = visit

    def _look(self, backbone: nn.Module, *_: Any) -> None:
        if self._now is not None:
            weights = {name: t.clone() for name, t in backbone.state_dict().items()}
            self.starts.append((self._now.round, self._now.client, weights))
            self._now = None

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        super().on_round_end(trainer, module, report)
        weights = {name: t.clone() for name, t in module.state_dict().items()}
        self.rounds.append((report.metrics["bytes_down"], report.metrics["bytes_up"], weights))


def backbone_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("backbone."): t for name, t in state.items() if name.startswith("backbone.")}


def test_a_part_that_is_unfrozen_joins_with_its_first_value_and_no_dual() -> None:
    eta, module, data = 0.5, Reader(), sentences()
    first = {name: t.clone() for name, t in module.state_dict().items()}
    watch = Watch(module)
    server = FederatedServer(FedADMM(eta=eta), clients_per_round=2, seed=SEED, evaluate_every=0)
    trainer = quiet_trainer(server, 2, callbacks=[Unfreeze(), watch])
    trainer.fit(module, datamodule=data)

    head = sum(p.numel() for p in module.head.parameters())
    everything = sum(p.numel() for p in module.parameters())
    (down_0, up_0, after_0), (down_1, up_1, after_1) = watch.rounds
    assert down_0 == up_0 == 2 * head * 4
    assert down_1 - down_0 == up_1 - up_0 == 2 * everything * 4

    assert_same(backbone_of(after_0), backbone_of(first))
    assert not torch.equal(after_0["head.weight"], first["head.weight"])
    for k, _, end in watch.ends:
        moved = [name for name, t in backbone_of(end).items() if not torch.equal(t, backbone_of(first)[name])]
        assert bool(moved) == (k == 1)
    for _, _, start in watch.starts:  # in round 1 too: nobody starts from what another client learnt
        assert_same(start, backbone_of(first))

    ends = {cid: end for k, cid, end in watch.ends if k == 1}
    names = [name for name in server.federation.layout.names if name.startswith("backbone.")]
    x_hat = {name: torch.zeros_like(first[name], dtype=torch.float64) for name in names}
    for cid in data.client_ids:
        state = server.federation.recall(cid)
        z_i = server.federation.layout.split(state.z_i) if cid in ends else {}
        for name in names:
            x_i = ends[cid][name] if cid in ends else first[name]
            dual = eta * (x_i - first[name])
            if cid in ends:
                assert torch.allclose(z_i[name], dual, atol=1e-7)
            x_hat[name] += (x_i + dual / eta).double() / len(data.client_ids)
    for name in names:
        assert torch.allclose(after_1[name].double(), x_hat[name], atol=1e-6), name
    assert len(trainer.optimizers[0].param_groups) == 2


def test_fine_tuning_goes_on_learning_after_the_part_has_joined() -> None:
    watch = Watch(module := Reader())
    server = FederatedServer(FedAvg(), seed=SEED, local_epochs=3)
    quiet_trainer(server, 8, callbacks=[Unfreeze(), watch]).fit(module, datamodule=sentences())
    assert watch.losses[-1] < 0.5 * watch.losses[0]


def test_a_part_that_stays_frozen_is_never_sent_and_never_changes() -> None:
    module = Reader()
    module.backbone.requires_grad_(False)
    first = {name: t.clone() for name, t in module.backbone.state_dict().items()}
    server = FederatedServer(FedADMM(eta=0.5), clients_per_round=2, seed=SEED)
    quiet_trainer(server, 3).fit(module, datamodule=sentences())
    assert_same(module.backbone.state_dict(), first)
    assert server.federation.layout.names == ("head.weight", "head.bias")
    assert server.federation.bytes_up == server.federation.bytes_down == 3 * 2 * 18 * 4

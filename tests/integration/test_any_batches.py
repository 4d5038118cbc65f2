"""Data as people have them: ragged sequences, graphs, dicts, dataclasses, class-balanced samplers, from end to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from helpers.drawn import positions
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg, Scaffold
from lightning_fed.callbacks import ClientEvaluation, Confusion
from lightning_fed.core.layout import Layout
from lightning_fed.core.randomness import torch_generator
from lightning_fed.engines.sequential import ClientError
from lightning_fed.evaluation.evaluate import client_gradient, evaluate_splits
from lightning_fed.lightning import _warn_of_guess

SEED, ROUNDS, LR, SIZES = 5, 3, 0.1, {"ann": 7, "bob": 4, "cem": 5}


def ragged(samples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of 1 to 5 vectors in float64, and a number for each."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (samples,), generator=g).tolist()
    return [(torch.randn(n, 3, generator=g).double(), torch.randn((), generator=g).double()) for n in lengths]


@dataclass
class Written:
    sequences: PackedSequence
    targets: Tensor


class Pair(NamedTuple):
    sequences: list[Tensor]
    targets: Tensor


class Graphs:
    """Stands for a batch of graphs: no tensor has one row per sample, and Lightning cannot look into it."""

    def __init__(self, rows: Tensor, owner: Tensor, targets: Tensor) -> None:
        self.rows, self.owner, self.targets = rows, owner, targets

    def to(self, device: Any, **_: Any) -> Graphs:
        return Graphs(self.rows.to(device), self.owner.to(device), self.targets.to(device))


def _parts(samples: list[Any]) -> tuple[list[Tensor], Tensor]:
    sequences, targets = zip(*samples, strict=True)
    return list(sequences), torch.stack(targets)


def packed(samples: list[Any]) -> tuple[PackedSequence, Tensor]:
    sequences, targets = _parts(samples)
    return pack_sequence(sequences, enforce_sorted=False), targets


def as_dict(samples: list[Any]) -> dict[str, Any]:
    sequences, targets = _parts(samples)
    return {"step": torch.tensor(1), "nested": [{"sequences": sequences}], "targets": targets}


def as_graphs(samples: list[Any]) -> Graphs:
    sequences, targets = _parts(samples)
    owner = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(s) for s in sequences]))
    return Graphs(torch.cat(sequences), owner, targets)


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "packed": packed,
    "dict": as_dict,
    "dataclass": lambda samples: Written(*packed(samples)),
    "namedtuple": lambda samples: Pair(*_parts(samples)),
    "graphs": as_graphs,
}


def means(batch: Any) -> tuple[Tensor, Tensor]:
    """The mean vector of each sequence, and the targets, whatever the batch is."""
    if isinstance(batch, Graphs):
        sums = torch.zeros(len(batch.targets), 3).double().index_add(0, batch.owner, batch.rows)
        return sums / torch.bincount(batch.owner).unsqueeze(1), batch.targets
    if isinstance(batch, dict):
        return torch.stack([s.mean(0) for s in batch["nested"][0]["sequences"]]), batch["targets"]
    sequences, targets = (batch.sequences, batch.targets) if isinstance(batch, Written) else batch
    if isinstance(sequences, PackedSequence):
        rows, lengths = nn.utils.rnn.pad_packed_sequence(sequences, batch_first=True)
        return rows.sum(1) / lengths.unsqueeze(1), targets
    return torch.stack([s.mean(0) for s in sequences]), targets


class Regression(pl.LightningModule):
    """Least squares on the means of sequences; the loss of a batch is the mean over its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        x, y = means(batch)
        return 0.5 * (x @ self.w - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


TRAIN = {cid: ragged(n, seed) for seed, (cid, n) in enumerate(SIZES.items())}
TEST = {cid: ragged(n, seed + 10) for seed, (cid, n) in enumerate(SIZES.items())}


def federation(collate_fn: Any, loader_options: Any = None, **kwargs: Any) -> FederatedDataModule:
    options = {"collate_fn": collate_fn, **(loader_options or {})}
    return FederatedDataModule(
        TRAIN, test=TEST, loader_options=options, **{"batch_size": 3, "eval_batch_size": 2, **kwargs}
    )


def loss_and_slope(w: Tensor, samples: list[Any]) -> tuple[float, Tensor]:
    """By formula, sample by sample."""
    x, y = torch.stack([s.mean(0) for s, _ in samples]), torch.stack([t for _, t in samples])
    rest = x @ w - y
    return float(0.5 * rest.square().mean()), x.t() @ rest / len(samples)


def by_hand(epochs_or_steps: dict[str, int], order: Callable[..., list[list[int]]] | None = None) -> Any:
    """FedAvg with its losses: models by round, local losses, means that are logged over all samples of a round."""
    w, history = Regression().w.detach(), []
    for round in range(ROUNDS):
        update, losses, logged, seen = torch.zeros(3).double(), [], 0.0, 0
        for cid, samples in TRAIN.items():
            own, total, count = w.clone(), 0.0, 0
            cut = order or positions
            for rows in cut(SEED, round, cid, len(samples), 3, epochs_or_steps.get("local_steps")):
                loss, slope = loss_and_slope(own, [samples[i] for i in rows])
                own -= LR * slope
                total, count = total + loss * len(rows), count + len(rows)
            update += len(samples) * (own - w) / sum(SIZES.values())
            losses.append(total / count)
            logged, seen = logged + total, seen + count
        w = w + update
        history.append((w.clone(), losses, logged / seen))
    return history


class Reports(pl.Callback):
    def __init__(self) -> None:
        self.rounds: list[Any] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        server = next(c for c in trainer.callbacks if isinstance(c, FederatedServer))
        self.rounds.append((pl_module.w.detach().clone(), list(server.report.losses.values()), metrics))


def fitted(data: FederatedDataModule, module: pl.LightningModule | None = None, **server: Any) -> tuple[Any, Any]:
    module, reports = module or Regression(), Reports()
    callback = FederatedServer(FedAvg(), **{"seed": SEED, "figure": False, **server})
    trainer = quiet_trainer(callback, ROUNDS, callbacks=[reports])
    trainer.fit(module, datamodule=data)
    return trainer, reports.rounds


def close(ours: Any, theirs: Any) -> bool:
    return bool(torch.allclose(torch.as_tensor(ours).double(), torch.as_tensor(theirs).double(), rtol=1e-12, atol=0))


@pytest.mark.parametrize("how", [{"local_epochs": 1}, {"local_steps": 4}], ids=["epoch", "steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_fedavg_on_batches_of_any_kind_is_fedavg_by_hand(kind: str, how: dict[str, int]) -> None:
    """Models, local losses (weighted by samples, also in short batches), what is logged, and every evaluation."""
    torch.set_default_dtype(torch.float64)  # what is logged is kept in it
    _, found = fitted(federation(KINDS[kind]), **how)
    for (w, losses, metrics), (w_, losses_, logged_) in zip(found, by_hand(how), strict=True):
        assert close(w, w_)
        assert close(losses, losses_)
        assert close(metrics["train_loss"], logged_)
        train = [loss_and_slope(w_, TRAIN[cid])[0] for cid in TRAIN]
        test = [loss_and_slope(w_, [s for cid in TEST for s in TEST[cid]])[0]]
        objective = sum(n * loss for n, loss in zip(SIZES.values(), train, strict=True)) / sum(SIZES.values())
        assert close(metrics["federated/train_loss"], objective)
        assert close(metrics["federated/test_loss"], test[0])
        assert close(metrics["val_loss"], test[0])  # Lightning's own loop, over pooled batches of two


class Measured(pl.Callback):
    """What is measured at the model of the last round, against formulas."""

    clients = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        w, layout, evaluated = pl_module.w.detach(), Layout.of(pl_module), evaluate_splits(trainer)
        for split, samples in (("train", TRAIN), ("test", TEST)):
            for cid, found in evaluated[split].by_client.items():
                assert found.examples == len(samples[cid])
                assert close(found.loss, loss_and_slope(w, samples[cid])[0])
        for cid in TRAIN:
            assert close(client_gradient(trainer, layout, cid), loss_and_slope(w, TRAIN[cid])[1])
            self.clients += 1


@pytest.mark.parametrize("kind", KINDS)
def test_clients_are_measured_by_their_samples(kind: str) -> None:
    torch.set_default_dtype(torch.float64)
    server, measured = FederatedServer(FedAvg(), seed=SEED, figure=False), Measured()
    quiet_trainer(server, 1, callbacks=[measured]).fit(Regression(), datamodule=federation(KINDS[kind]))
    assert measured.clients == len(TRAIN)


def test_double_precision_converts_batches_as_under_a_plain_trainer() -> None:
    single = {cid: [(s.float(), t.float()) for s, t in samples] for cid, samples in TRAIN.items()}
    data = FederatedDataModule(single, batch_size=3, loader_options={"collate_fn": packed})
    server = FederatedServer(FedAvg(), seed=SEED, local_steps=4, figure=False)
    module = Regression()
    quiet_trainer(server, ROUNDS, precision="64-true").fit(module, datamodule=data)
    assert torch.allclose(module.w.detach(), by_hand({"local_steps": 4})[-1][0], atol=1e-6)


@pytest.mark.parametrize("engine", [{"workers": 2}, {"engine": "auto"}, {"engine": "sequential"}])
def test_engines_agree_on_batches_of_any_kind(engine: dict[str, Any]) -> None:
    module = Regression()
    fitted(federation(as_graphs), module, local_steps=4, **engine)
    assert close(module.w.detach(), by_hand({"local_steps": 4})[-1][0])


def test_processes_load_what_this_process_would() -> None:
    module = Regression()
    data = federation(as_dict, loader_options={"num_workers": 1, "prefetch_factor": 1})
    fitted(data, module, local_epochs=1, evaluate_every=0)
    assert close(module.w.detach(), by_hand({"local_epochs": 1})[-1][0])


def test_a_plain_trainer_pools_batches_of_any_kind() -> None:
    module = Regression()
    quiet_trainer(None, 1, limit_val_batches=0).fit(module, datamodule=federation(packed, batch_size=100))
    w = Regression().w.detach()
    everything = [sample for samples in TRAIN.values() for sample in samples]
    assert close(module.w.detach(), w - LR * loss_and_slope(w, everything)[1])


class Stackable(Net):
    stackable = loss_is_mean = True


def pairs(samples: list[Any]) -> list[Tensor]:
    """Collates as torch does, but a stack does not know that."""
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def test_a_stack_is_refused_by_name_and_passed_over_by_auto() -> None:
    data = classification(4, loader_options={"collate_fn": pairs})
    server = FederatedServer(FedAvg(), engine="vectorized", local_steps=2)
    with pytest.raises(ValueError, match=r"impossible here: the data have a collate_fn of their own"):
        quiet_trainer(server, 1).fit(Stackable(), datamodule=data)
    models = [Stackable(), Stackable()]
    for module, own in zip(models, (data, classification(4)), strict=True):
        server = FederatedServer(FedAvg(), local_steps=2, seed=1)
        quiet_trainer(server, 2).fit(module, datamodule=own)
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_many_clients_are_evaluated_one_by_one_if_they_have_a_collate_fn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning_fed.evaluation.evaluate")
    server = FederatedServer(FedAvg(), local_steps=1, figure=False)
    quiet_trainer(server, 1).fit(Stackable(), datamodule=classification(20, loader_options={"collate_fn": pairs}))
    assert "evaluated one by one: UnfitError: the data have a collate_fn of their own" in caplog.text


# -- samplers ---------------------------------------------------------------------------------------------------------


def weighted(dataset: Any, generator: torch.Generator) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, len(dataset) + 1), 2 * len(dataset), generator=generator)


def weighted_by_hand(seed: int, round: int, cid: Any, samples: int, size: int, steps: int | None) -> list[list[int]]:
    """The batches of a visit of one epoch, or of so many steps, with torch's own multinomial."""

    def order(epoch: int) -> list[int]:
        g = torch_generator(seed, round, cid, epoch, "sampler")
        weights = torch.arange(1.0, samples + 1).double()
        return torch.multinomial(weights, 2 * samples, True, generator=g).tolist()

    stream = order(0) if steps is None else [i for epoch in range(steps) for i in order(epoch)][: steps * size]
    return [stream[i : i + size] for i in range(0, len(stream), size)]


@pytest.mark.parametrize("how", [{"local_epochs": 1}, {"local_steps": 8}], ids=["epoch", "steps"])
@pytest.mark.parametrize("workers", [1, 2])
def test_fedavg_with_a_sampler_is_fedavg_by_hand(how: dict[str, int], workers: int) -> None:
    _, found = fitted(federation(packed, sampler=weighted), workers=workers, **how)
    for (w, losses, _), (w_, losses_, _) in zip(found, by_hand(how, weighted_by_hand), strict=True):
        assert close(w, w_)  # weighted by the client's samples, not by how many the sampler gives
        assert close(losses, losses_)


def test_a_sampler_under_a_plain_trainer() -> None:
    trainer = quiet_trainer(None, 2, limit_val_batches=0)
    trainer.fit(Regression(), datamodule=federation(packed, sampler=weighted))
    assert trainer.global_step == 2 * math.ceil(2 * sum(SIZES.values()) / 3)


def test_a_sampler_may_fill_batches_that_the_data_could_not() -> None:
    server = FederatedServer(FedAvg(), local_epochs=1, seed=SEED, figure=False)
    data = federation(packed, sampler=weighted, batch_size=8, drop_last=True)
    quiet_trainer(server, 1).fit(Regression(), datamodule=data)
    assert server.federation.cost.steps == sum(2 * n // 8 for n in SIZES.values())


@pytest.mark.parametrize("how", [{"local_epochs": 2}, {"local_steps": 5}], ids=["epochs", "steps"])
@pytest.mark.parametrize("algorithm", [FedADMM(), Scaffold()], ids=["FedADMM", "Scaffold"])
def test_a_run_with_sampler_and_collate_fn_resumes_bitwise(algorithm: Any, how: Any, tmp_path: Path) -> None:
    def run(rounds: int, start: Path | None = None) -> tuple[pl.Trainer, Tensor]:
        server = FederatedServer(algorithm, clients_per_round=2, seed=SEED, figure=False, **how)
        module, trainer = Regression(), quiet_trainer(server, rounds)
        trainer.fit(module, datamodule=federation(packed, sampler=weighted), ckpt_path=start)
        return trainer, module.w.detach().clone()

    _, whole = run(5)
    half, _ = run(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(123)
    assert torch.equal(run(5, tmp_path / "half.ckpt")[1], whole)


def test_a_sampler_that_fails_names_the_client() -> None:
    server = FederatedServer(FedAvg(), seed=SEED, local_steps=2)
    data = federation(packed, sampler=lambda d, g: [] if len(d) == 4 else [0])
    with pytest.raises(
        ClientError, match="round 0, client 'bob': ValueError: sampler gave no samples for client 'bob'"
    ):
        quiet_trainer(server, 1).fit(Regression(), datamodule=data)


# -- loaders of the user's own ----------------------------------------------------------------------------------------


class OwnLoaders(FederatedDataModule):
    """Loaders that only give batches: nobody knows which samples are in them."""

    def client_dataloader(self, cid: Any, generator: Any = None, *, shuffle: bool = True) -> Any:
        return list(self._dataloader(self.client_dataset(cid), batch_size=3))

    def client_eval_dataloader(self, cid: Any, split: str) -> Any:
        return list(self._dataloader(self.client_dataset(cid, split), batch_size=3))


def test_a_loader_of_the_users_own_is_warned_of_once_where_its_batches_cannot_be_counted() -> None:
    class Silent(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

        validation_step = None

    _warn_of_guess.cache_clear()
    data = OwnLoaders(TRAIN, batch_size=3, loader_options={"collate_fn": as_graphs})
    with pytest.warns(UserWarning, match="samples of a Graphs from a loader of your own is not known") as caught:
        trainer, _ = fitted(data, Silent(), local_epochs=1)
    assert sum("is not known" in str(w.message) for w in caught) == 1
    slopes = [loss_and_slope(trainer.lightning_module.w.detach(), TRAIN["ann"][i : i + 3])[1] for i in (0, 3, 6)]
    gradient = client_gradient(trainer, Layout.of(trainer.lightning_module), "ann")
    assert close(gradient, sum(slopes) / 3)  # still a mean, of batches that count alike
    _warn_of_guess.cache_clear()


def test_a_dataloader_of_the_users_own_is_counted() -> None:
    class Counted(FederatedDataModule):
        def client_dataloader(self, cid: Any, generator: Any = None, *, shuffle: bool = True) -> Any:
            return DataLoader(self.client_dataset(cid), 3, collate_fn=as_graphs)

    def in_order(seed: int, round: int, cid: Any, samples: int, size: int, steps: Any) -> list[list[int]]:
        return [[*range(i, min(i + size, samples))] for i in range(0, samples, size)]

    data = Counted(TRAIN, batch_size=3, loader_options={"collate_fn": as_graphs})
    _, found = fitted(data, local_epochs=1)
    for (w, losses, _), (w_, losses_, _) in zip(found, by_hand({}, in_order), strict=True):
        assert close(w, w_)
        assert close(losses, losses_)


# -- errors that say what to do ---------------------------------------------------------------------------------------


def test_a_last_batch_of_one_sample_with_batchnorm_says_what_to_do() -> None:
    server = FederatedServer(FedAvg(), local_epochs=1)
    data = classification(2, batch_size=4)  # 9 and 10 samples
    with pytest.raises(
        ClientError, match=r"client 'c0': ValueError: Expected more than 1 .*one sample.*drop_last=True"
    ):
        quiet_trainer(server, 1).fit(Net(norm=True), datamodule=data)
    for how, options in (({"local_epochs": 1}, {"drop_last": True}), ({"local_steps": 5}, {})):
        server = FederatedServer(FedAvg(), **how)
        quiet_trainer(server, 1).fit(Net(norm=True), datamodule=classification(2, batch_size=4, **options))


def test_confusion_refuses_batches_that_are_no_pairs() -> None:
    server = FederatedServer(FedAvg(), figure=False, evaluate_every=0)
    with pytest.raises(TypeError, match=r"Confusion needs batches \(x, y\), got dict"):
        quiet_trainer(server, 1, callbacks=[Confusion()]).fit(Regression(), datamodule=federation(as_dict))


def test_tensors_in_memory_are_given_to_collate_fn_sample_by_sample() -> None:
    seen: list[Any] = []

    def note(samples: list[Any]) -> list[Tensor]:
        seen.append(samples)
        return pairs(samples)

    held = TensorDataset(torch.randn(6, 6), torch.zeros(6, dtype=torch.int64))
    data = FederatedDataModule([held], loader_options={"collate_fn": note})
    server = FederatedServer(FedAvg(), local_steps=1, figure=False)
    quiet_trainer(server, 1, callbacks=[ClientEvaluation()]).fit(Net(), datamodule=data)
    assert len(seen) >= 2
    assert all(len(samples) == 6 and samples[0][0].shape == (6,) for samples in seen)

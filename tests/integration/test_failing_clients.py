"""A client that fails: its round is not committed, the error names it, and the run can go on as if it never had."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from helpers.reuse import assert_same
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedDR
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.engines.sequential import ClientError

ROUNDS, FAILS_IN, STEPS = 4, 2, 3
KINDS = ["raises", "nan loss", "inf loss", "nan weights", "interrupt", "exit"]
WORDS = {
    "raises": "ZeroDivisionError: no luck",
    "nan loss": "mean loss of 3 local steps is nan",
    "inf loss": "mean loss of 3 local steps is inf",
    "nan weights": "not finite",
}


FAILURES: Counter[int] = Counter()  # by module; what a module counts in itself, a visit forgets


class Fragile(Net):
    """Fails in the middle of the visit of one client, unless it is mended."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(dropout=0.2, norm=True, **kwargs)
        self.kind, self.mended = kind, False
        self.visit = None
        FAILURES[id(self)] = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        step = batch_idx + 1
        if self.mended or step != (STEPS if self.kind == "nan weights" else 2) or not self.is_the_one():
            return loss
        FAILURES[id(self)] += 1
        if self.kind == "raises":
            raise ZeroDivisionError("no luck")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "exit":
            raise SystemExit(3)
        if self.kind == "nan weights":
            with torch.no_grad():
                self.net[0].weight[0, 0] = float("nan")
            return loss
        return loss + float(self.kind.removesuffix(" loss"))  # the gradient, and so the weights, stay finite

    @property
    def failures(self) -> int:
        return FAILURES[id(self)]

    def is_the_one(self) -> bool:
        return self.visit == (FAILS_IN, "c2")


class Knows(FederatedCallback):
    """Tells the module whose turn it is, and keeps what each round committed."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        module.visit = (visit.round, visit.client)

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.rounds.append({name: t.clone() for name, t in module.state_dict().items()})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = trainer.callback_metrics.items()
        self.logged.append({name: float(value) for name, value in known if name != "federated/seconds"})


@pytest.fixture(autouse=True)
def _restore_interrupts() -> Iterator[None]:
    """Lightning ignores Ctrl-C for good after the first one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def data() -> FederatedDataModule:
    return classification(batch_size=6)  # no batch of one sample, which BatchNorm refuses


def server_of(policy: Any = "average", algorithm: Any = None, evaluate_every: int = 0) -> FederatedServer:
    algorithm = algorithm or FedADMM(eta=0.5)
    return FederatedServer(algorithm, local_steps=STEPS, seed=4, buffers=policy, evaluate_every=evaluate_every)


def run_without_failure(module: Fragile, server: FederatedServer, **kwargs: Any) -> Knows:
    module.mended, knows = True, Knows()
    quiet_trainer(server, ROUNDS, callbacks=[knows], **kwargs).fit(module, datamodule=data())
    return knows


def fail(trainer: pl.Trainer, module: Fragile) -> BaseException:
    wanted: Any = {"interrupt": SystemExit, "exit": SystemExit}.get(module.kind, ClientError)
    with pytest.raises(wanted) as caught:
        trainer.fit(module, datamodule=data())
    assert module.failures >= 1
    return caught.value


def memories(server: FederatedServer) -> dict[str, Tensor]:
    """Everything the federation remembers, by name."""
    federation = server.federation
    found = {f"server.{name}": value for name, value in vars(federation.server).items()}
    for cid in federation.store:
        memory = federation.store[cid]
        found |= {f"{cid}.{name}": value for name, value in vars(memory.state).items()}
        found |= {f"{cid}.buffers.{name}": value for name, value in memory.buffers.items()}
        found[f"{cid}.visits"] = torch.tensor(memory.visits)
    found |= {f"buffers.{name}": value for name, value in federation.buffers.items()}
    found["traffic"] = torch.tensor([federation.bytes_down, federation.bytes_up, federation.rounds_done])
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("kind", WORDS)
def test_the_error_names_round_and_client_and_keeps_the_cause(kind: str) -> None:
    error = fail(quiet_trainer(server_of(), ROUNDS, callbacks=[Knows()]), Fragile(kind))
    assert str(error).startswith(f"round {FAILS_IN}, client 'c2': ")
    assert WORDS[kind] in str(error)
    if kind == "raises":
        assert isinstance(error.__cause__, ZeroDivisionError)
    elif kind == "nan weights":
        assert "learning rate 0.05" in str(error)
        assert "not committed" in str(error)
    else:
        assert isinstance(error.__cause__, FloatingPointError)


class Remembers(Knows):
    """What the server remembered before each round, beside the weights."""

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: Any) -> None:
        self.before = memories(trainer.fit_loop.server)
        self.optimizers = [str(optimizer.state_dict()) for optimizer in trainer.optimizers]
        self.schedulers = [str(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]


@pytest.mark.parametrize(("kind", "policy"), [*((kind, "average") for kind in KINDS), ("raises", "local")])
def test_a_round_that_failed_leaves_no_trace(kind: str, policy: Any) -> None:
    knows, server, module = Remembers(), server_of(policy), Fragile(kind, optimizer="adagrad", scheduler="step")
    trainer = quiet_trainer(server, ROUNDS, callbacks=[knows])
    fail(trainer, module)
    assert len(knows.rounds) == server.rounds_done == FAILS_IN
    assert trainer.global_step == trainer.current_epoch == FAILS_IN
    assert_same(module.state_dict(), knows.rounds[-1])
    assert_same(memories(server), knows.before)
    assert [str(optimizer.state_dict()) for optimizer in trainer.optimizers] == knows.optimizers
    assert [str(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs] == knows.schedulers
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


@pytest.mark.parametrize(("kind", "policy"), [*((kind, "average") for kind in KINDS), ("raises", "local")])
def test_fitting_again_goes_on_to_the_numbers_of_a_run_that_never_failed(kind: str, policy: Any) -> None:
    never = run_without_failure(whole := Fragile(kind, optimizer="momentum"), straight := server_of(policy))
    knows, server, module = Knows(), server_of(policy), Fragile(kind, optimizer="momentum")
    trainer = quiet_trainer(server, ROUNDS, callbacks=[knows])
    fail(trainer, module)
    module.mended = True
    trainer.fit(module, datamodule=data())
    assert_same(module.state_dict(), whole.state_dict())
    assert_same(memories(server), memories(straight))
    assert len(knows.rounds) == len(never.rounds) == trainer.current_epoch == trainer.global_step == ROUNDS
    for k in range(ROUNDS):
        assert_same(knows.rounds[k], never.rounds[k])


class Measured(Fragile):
    """Also logs a metric object."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("metric", self.accuracy, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["raises", "interrupt"])
@pytest.mark.parametrize("module_type", [Fragile, Measured])
def test_what_the_failed_round_logged_is_forgotten(module_type: type[Fragile], kind: str) -> None:
    """The means over a round's clients, as logged by the module, count no sample of the round that failed."""
    never = run_without_failure(module_type(kind), server_of(evaluate_every=1))
    knows, module = Knows(), module_type(kind)
    trainer = quiet_trainer(server_of(evaluate_every=1), ROUNDS, callbacks=[knows])
    fail(trainer, module)
    module.mended = True
    trainer.fit(module, datamodule=data())
    for k in range(ROUNDS):
        assert knows.logged[k] == never.logged[k], f"round {k}"


@pytest.mark.parametrize("kind", ["raises", "nan weights", "interrupt"])
@pytest.mark.parametrize("scheduler", ["step", "epoch"])
def test_a_resume_goes_on_to_the_numbers_of_a_run_that_never_failed(kind: str, scheduler: str) -> None:
    settings = {"optimizer": "adam", "scheduler": scheduler}
    whole, straight = Fragile(kind, **settings), server_of()
    run_without_failure(whole, straight)
    saving = ModelCheckpoint(dirpath="kept", save_last=True)
    broken = quiet_trainer(server_of(), ROUNDS, callbacks=[Knows(), saving], enable_checkpointing=True)
    fail(broken, Fragile(kind, **settings))
    module, server, knows = Fragile(kind, **settings), server_of(), Knows()
    module.mended = True
    saving = ModelCheckpoint(dirpath="kept", save_last=True)
    trainer = quiet_trainer(server, ROUNDS, callbacks=[knows, saving], enable_checkpointing=True)
    trainer.fit(module, datamodule=data(), ckpt_path="kept/last.ckpt")
    assert len(knows.rounds) == ROUNDS - FAILS_IN
    assert_same(module.state_dict(), whole.state_dict())
    assert_same(memories(server), memories(straight))


def test_a_failure_before_round_0_is_rolled_back_too() -> None:
    """FedDR's full start asks everybody once before the first round."""
    whole, straight = Fragile("raises"), server_of(algorithm=FedDR(init="prox"))
    run_without_failure(whole, straight)

    class FailsAtOnce(Fragile):
        def is_the_one(self) -> bool:
            return self.visit == (-1, "c2")

    knows, module, server = Knows(), FailsAtOnce("raises"), server_of(algorithm=FedDR(init="prox"))
    first = {name: t.clone() for name, t in module.state_dict().items()}
    trainer = quiet_trainer(server, ROUNDS, callbacks=[knows])
    error = fail(trainer, module)
    assert "client 'c2'" in str(error)
    assert_same(module.state_dict(), first)
    assert server.rounds_done == len(server.federation.store) == 0
    module.mended = True
    trainer.fit(module, datamodule=data())
    assert_same(module.state_dict(), whole.state_dict())
    assert_same(memories(server), memories(straight))

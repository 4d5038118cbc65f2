"""The gradient that `Trainer.fit` steps along is that of loss + <z_i, x> + eta/2 |x - x_bar|^2, written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.drawn import batches
from helpers.modules import LeastSquares, Net, classification, least_squares, quiet_trainer, x_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedDR, FedProx
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.prox import L1
from lightning_fed.sampling import Uniform

ROUNDS, SEED, ETA = 4, 11, 0.7
Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, tolerance_change=0, tolerance_grad=0),
}


class Trained(Net):
    def __init__(self, name: str, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.make_optimizer = OPTIMIZERS[name]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class ByHand(Trained):
    """The same training, by manual optimisation."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self._loss(batch, "train")
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def visit(
    module: nn.Module,
    data: FederatedDataModule,
    make: Optimizer,
    question: Callable[[Tensor], Tensor],
    key: tuple[int, str],
    steps: int,
    clip: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
) -> Tensor:
    """Local work of one client in plain torch: a stream of batches, in windows that run through the visit."""
    params = list(module.parameters())
    optimizer, drawn = make(params), batches(data, key[1], SEED, key[0], steps)
    for first in range(0, steps, accumulate):
        window: list[Any] = []  # filled as gradients are taken: a batch may seed the masks of dropout

        def closure(window: list[Any] = window, size: int = min(accumulate, steps - first)) -> Tensor:
            optimizer.zero_grad()
            again, losses = list(window), []
            for i in range(size):
                window += [next(drawn)] if not again else []
                x, y = window[i]
                losses.append(nn.functional.cross_entropy(module(x.double()), y))
            whole = sum(losses) / accumulate + question(parameters_to_vector(params))
            whole.backward()
            if clip is not None:
                clip(params)
            return whole

        optimizer.step(closure)
    return x_of(module)


def fedadmm_by_hand(module: nn.Module, data: FederatedDataModule, cohort_size: int, **work: Any) -> list[Tensor]:
    """x_bar after every round of FedADMM, which is what its paper says and nothing else."""
    ids, scratch = data.client_ids, copy.deepcopy(module)
    x_bar = x_tilde = x_of(module)
    x_i, z_i, x_hat_i = (dict.fromkeys(ids, start) for start in (x_bar, torch.zeros_like(x_bar), x_bar))
    history = []
    for k in range(ROUNDS):
        x_bar_k = x_bar.clone()
        for cid in (ids[i] for i in Uniform(cohort_size).cohort(len(ids), SEED, k)):
            vector_to_parameters(x_i[cid].clone(), scratch.parameters())
            z = z_i[cid]

            def question(x: Tensor, z: Tensor = z, x_bar: Tensor = x_bar_k) -> Tensor:
                return z @ x + ETA / 2 * (x - x_bar).square().sum()

            x_i[cid] = visit(scratch, data, question=question, key=(k, cid), **work)
            z_i[cid] = z + ETA * (x_i[cid] - x_bar_k)
            fresh = x_i[cid] + z_i[cid] / ETA
            x_tilde = x_tilde + (fresh - x_hat_i[cid]) / len(ids)
            x_hat_i[cid] = fresh
        x_bar = x_tilde
        history.append(x_bar)
    return history


class Trace(FederatedCallback):
    def __init__(self) -> None:
        self.x_bar: list[Tensor] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.x_bar.append(x_of(module))


def compare(
    module: Trained, steps: int = 7, clip: Any = None, accumulate: int = 1, batch_size: int = 4, **trainer: Any
) -> None:
    """Fit and the hand-written loop, round by round."""
    data, trace = classification(5, batch_size=batch_size), Trace()
    module = module.double()
    expected = fedadmm_by_hand(
        module, data, 2, make=module.make_optimizer, steps=steps, clip=clip, accumulate=accumulate
    )
    before = x_of(module)
    server = FederatedServer(
        FedADMM(eta=ETA, start="local"), clients_per_round=2, local_steps=steps, seed=SEED, evaluate_every=0
    )
    trainer = {"precision": "64-true", "limit_val_batches": 0, **trainer}
    quiet_trainer(server, ROUNDS, callbacks=[trace], **trainer).fit(module, datamodule=data)
    assert len(trace.x_bar) == ROUNDS
    for k, (ours, theirs) in enumerate(zip(trace.x_bar, expected, strict=True)):
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=0), f"round {k}: {(ours - theirs).abs().max()}"
    assert (trace.x_bar[-1] - before).abs().max() > 1e-3, "nothing was trained"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_steps_along_the_gradient_of_the_augmented_lagrangian(name: str) -> None:
    compare(Trained(name), batch_size=100 if name == "lbfgs" else 4)  # L-BFGS diverges on changing batches


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_dropout_draws_the_masks_that_seed_round_client_and_epoch_say(name: str) -> None:
    compare(Trained(name, dropout=0.4))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_clipping_sees_the_whole_augmented_gradient(name: str) -> None:
    limit = 0.05
    compare(
        Trained(name),
        clip=lambda params: clip_grad_norm_(params, limit),
        gradient_clip_val=limit,
        gradient_clip_algorithm="norm",
    )


def test_clipping_by_value_sees_the_whole_augmented_gradient() -> None:
    compare(
        Trained("sgd"),
        clip=lambda params: clip_grad_value_(params, 0.02),
        gradient_clip_val=0.02,
        gradient_clip_algorithm="value",
    )


@pytest.mark.parametrize("accumulate", [2, 3, 100])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_accumulation_adds_the_penalty_once_per_step(name: str, accumulate: int) -> None:
    compare(Trained(name), accumulate=accumulate, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_accumulation_clipping_and_dropout_go_together(name: str) -> None:
    compare(
        Trained(name, dropout=0.3),
        clip=lambda params: clip_grad_norm_(params, 0.1),
        gradient_clip_val=0.1,
        accumulate=2,
        accumulate_grad_batches=2,
    )


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_manual_optimisation_steps_along_the_same_gradient(name: str) -> None:
    compare(ByHand(name))


def test_clipping_by_hand_before_step_does_not_see_the_penalty() -> None:
    """As docs/rounds.md says: with manual optimisation the penalty is added inside ``optimizer.step()``."""

    class Clips(ByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self._loss(batch, "train"))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()

    with pytest.raises(AssertionError):
        compare(Clips("sgd"), clip=lambda params: clip_grad_norm_(params, 0.05))


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_visits_may_end_inside_an_epoch(steps: int) -> None:
    compare(Trained("momentum"), steps=steps)


@pytest.mark.parametrize("algorithm", [FedADMM(eta=ETA), FedDR(eta_hat=1 / ETA), FedProx(mu=ETA)], ids=repr)
def test_the_logged_loss_stays_that_of_the_module(algorithm: Any) -> None:
    """With one full batch and a step of length zero, the loss of a visit is f_i(x0), whatever the penalty."""
    data, quadratics = least_squares()
    module = LeastSquares(4, lr=0.0)
    server = FederatedServer(algorithm, local_steps=2)
    quiet_trainer(server, 1).fit(module, datamodule=data)
    for cid in data.client_ids:
        x, y = data.client_dataset(cid).tensors
        assert server.report.losses[cid] == pytest.approx(
            float(0.5 * (x @ x_of(module) - y).square().mean()), abs=1e-12
        )
    assert len(quadratics) == len(server.report.losses)


class Forgetful(LeastSquares):
    """Has a parameter that the loss never sees."""

    def __init__(self, d: int, lr: float) -> None:
        super().__init__(d, lr)
        self.unused = nn.Parameter(torch.tensor([2.0, -3.0, 0.1], dtype=torch.float64))


def test_a_parameter_the_loss_never_sees_obeys_the_augmented_lagrangian() -> None:
    """For it f_i = 0: a gradient step from x_i contracts to x_bar - z_i/eta by 1 - lr*eta; only g makes it move."""
    lr, steps, lam = 0.1, 3, 0.2
    data, _ = least_squares(n=3)
    module = Forgetful(4, lr)
    ids, start, contraction = data.client_ids, module.unused.detach().clone(), (1 - lr * ETA) ** steps
    algorithm = FedADMM(eta=ETA, g=L1(lam), start="local")
    server = FederatedServer(algorithm, clients_per_round=2, local_steps=steps, seed=SEED, evaluate_every=0)
    quiet_trainer(server, 6).fit(module, datamodule=data)

    x_bar = x_tilde = start
    x_i, z_i, x_hat_i = (dict.fromkeys(ids, value) for value in (start, torch.zeros_like(start), start))
    for k in range(6):
        sent = x_bar
        for cid in (ids[i] for i in Uniform(2).cohort(3, SEED, k)):
            goal = sent - z_i[cid] / ETA
            x_i[cid] = goal + contraction * (x_i[cid] - goal)
            z_i[cid] = z_i[cid] + ETA * (x_i[cid] - sent)
            x_tilde = x_tilde + (x_i[cid] + z_i[cid] / ETA - x_hat_i[cid]) / 3
            x_hat_i[cid] = x_i[cid] + z_i[cid] / ETA
        x_bar = x_tilde.sign() * (x_tilde.abs() - lam / ETA).clamp(min=0)
    assert torch.allclose(module.unused.detach(), x_bar, atol=1e-10, rtol=0)
    assert (x_bar - start).abs().max() > 0.2
    for cid in ids:
        state = server.federation.store[cid].state
        assert torch.allclose(state.x_i[-3:], x_i[cid], atol=1e-10, rtol=0)
        assert torch.allclose(state.z_i[-3:], z_i[cid], atol=1e-10, rtol=0)

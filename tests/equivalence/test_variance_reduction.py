"""FedPD's oracle II: steps along an estimate of the gradient, in closed form and through `Trainer.fit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers import references
from helpers.modules import LeastSquares, Net, classification, least_squares, quiet_trainer, x_of
from helpers.problems import LAW, close, gradient, random_clients, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedServer, FiniteSum, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedPD
from lightning_fed.core.randomness import torch_generator

ETA_HAT, GAMMA, D = 0.5, 0.125, 4
LR = GAMMA * ETA_HAT / (GAMMA + ETA_HAT)  # of the gradient step that minimises the linearised model


def sums(seed: int, n: int = 3, samples: int = 6) -> tuple[list[FiniteSum], Tensor]:
    quadratics, x0 = random_clients(seed, n * samples, 3, convex=True)
    return [FiniteSum(quadratics[i * samples : (i + 1) * samples]) for i in range(n)], x0


@given(seeds, st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.sampled_from([0.0, 0.5]))
@LAW
def test_oracle_ii_is_its_definition(seed, steps, size, refresh, skip):
    clients, x0 = sums(seed)
    algorithm = FedPD(ETA_HAT, skip=skip, seed=seed, oracle="II", refresh_every=refresh)
    ours = simulate(algorithm, clients, x0, rounds=7, solver=GradientDescent(steps, LR, batch_size=size), seed=2)

    def drawn(k, i):
        rng = torch_generator(2, k, i, "batches")
        return [torch.randperm(6, generator=rng)[:size].tolist() for _ in range(steps)]

    samples = [[(A.numpy(), b.numpy()) for A, b in zip(f._A, f._b, strict=True)] for f in clients]
    batches = [[drawn(k, i) for i in range(3)] for k in range(7)]
    talks = [algorithm.exchanges(k) for k in range(7)]
    rows = references.fedpd_ii(samples, x0.numpy(), talks, ETA_HAT, GAMMA, refresh, batches)
    for k, row in enumerate(rows):
        close(ours.server[k].x_bar, row.x_bar)
        for i, state in enumerate(ours.clients[k]):
            close(state.x_i, row.x[i])
            close(state.lam_i, row.lam[i])
            close(state.v_i, row.v[i])


@pytest.mark.parametrize("refresh", [1, 5, 100])
def test_with_full_batches_the_oracles_are_one(refresh):
    clients, x0 = sums(3)
    how = {"rounds": 20, "solver": GradientDescent(4, LR)}
    first = simulate(FedPD(ETA_HAT), clients, x0, **how)
    second = simulate(FedPD(ETA_HAT, oracle="II", refresh_every=refresh), clients, x0, **how)
    for one, two in zip(first.server, second.server, strict=True):
        close(one.x_bar, two.x_bar, 1e-12)


def test_single_samples_reach_the_minimum_which_oracle_i_does_not():
    clients, x0 = sums(4)
    how = {"rounds": 400, "solver": GradientDescent(5, 0.05, batch_size=1)}
    noisy = simulate(FedPD(0.2), clients, x0, **how).x_bar
    reduced = simulate(FedPD(0.2, oracle="II", refresh_every=2), clients, x0, **how).x_bar
    assert gradient(clients, noisy).norm() > 1e-2
    assert gradient(clients, reduced).norm() < 1e-8


def test_a_sum_of_samples_is_their_mean_and_its_batches_are_those_of_some():
    parts = [Quadratic.scalar(1.0, 2.0), Quadratic.scalar(2.0, 0.0), Quadratic.scalar(6.0, 1.0)]
    f, x = FiniteSum(parts), torch.tensor([0.7], dtype=torch.float64)
    assert f.num_examples == 3
    close(f(x), sum(p(x) for p in parts) / 3, 1e-15)
    close(f.grad(x), sum(p.grad(x) for p in parts) / 3, 1e-15)
    close(f.batch(torch.tensor([2, 0])).grad(x), (parts[0].grad(x) + parts[2].grad(x)) / 2, 1e-15)
    with pytest.raises(TypeError, match="FiniteSum is made of one Quadratic or more, got"):
        FiniteSum([])
    for client, size in ((parts[0], 1), (f, 4)):
        with pytest.raises(ValueError, match=rf"batch_size={size}\) needs clients that are a FiniteSum of as many"):
            simulate(FedPD(), [client], [0.0], rounds=1, solver=GradientDescent(1, 0.1, batch_size=size))


@pytest.mark.parametrize("start", ["server", "centre"])
def test_an_estimate_elsewhere_than_at_the_own_model_is_refused(start):
    with pytest.raises(ValueError, match=rf"FedPD\.start must be local with oracle=\"II\", got '{start}'"):
        FedPD(oracle="II", start=start)
    with pytest.raises(TypeError, match="works step by step; use GradientDescent, not Exact"):
        simulate(FedPD(oracle="II"), sums(0)[0], rounds=1)


ASKED: list[tuple[np.ndarray, np.ndarray]] = []  # not in the module, which a second look leaves as it was
NOISE: list[float] = []


class Recording(LeastSquares):
    """Least squares that write down which samples they are asked about, and where."""

    def __init__(self) -> None:
        super().__init__(D, LR)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.training:  # full gradients are taken in evaluation mode
            ASKED.append((batch[0].numpy().copy(), self.w.detach().numpy().copy()))
        return super().training_step(batch, batch_idx)


class Listener(pl.Callback):
    """Does nothing, but has to be called, so that steps are not lean."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


@pytest.mark.parametrize("callbacks", [[], [Listener()]], ids=["lean", "hooked"])
def test_a_fit_follows_the_definition_on_its_own_batches(callbacks: list[pl.Callback]) -> None:
    ASKED.clear()
    whole, _ = least_squares(n=3)
    data = FederatedDataModule(dict(whole.splits["train"]), batch_size=2)
    algorithm = FedPD(ETA_HAT, oracle="II", refresh_every=3, skip=0.4, seed=1)
    server, module = FederatedServer(algorithm, local_steps=4, evaluate_every=0, seed=3), Recording()
    quiet_trainer(server, 7, callbacks=callbacks).fit(module, datamodule=data)
    assert len(ASKED) == 7 * 3 * 4 * 2  # both ends of every step, on the same batch
    for (before, _), (after, _) in zip(ASKED[::2], ASKED[1::2], strict=True):
        assert np.array_equal(before, after)

    tensors = [d.tensors for d in data.splits["train"].values()]
    samples = [[(np.outer(x, x), x * float(y)) for x, y in zip(X.numpy(), Y, strict=True)] for X, Y in tensors]
    rows = [{x.tobytes(): j for j, x in enumerate(X.numpy())} for X, _ in tensors]
    visits = [ASKED[k : k + 8 : 2] for k in range(0, len(ASKED), 8)]
    batches = [
        [[[rows[i][x.tobytes()] for x in inputs] for inputs, _ in visits[3 * k + i]] for i in range(3)]
        for k in range(7)
    ]
    talks = [algorithm.exchanges(k) for k in range(7)]
    x0 = torch.linspace(-1, 1, D, dtype=torch.float64).numpy()
    last = references.fedpd_ii(samples, x0, talks, ETA_HAT, GAMMA, 3, batches)[-1]
    assert server.federation is not None
    close(server.federation.server.x_bar, last.x_bar, 1e-12)
    for i in range(3):
        state = server.federation.store[i].state
        close(state.x_i, last.x[i], 1e-12)
        close(state.v_i, last.v[i], 1e-12)


class Noisy(Net):
    """A loss with noise of its own, which it writes down; logs, statistics and counters are to be kept once a step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5, norm=True)
        self.register_buffer("steps_seen", torch.tensor(0))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.training:
            NOISE.append(float(torch.rand(())) + float(np.random.rand()))
        self.steps_seen += 1
        return super().training_step(batch, batch_idx)


def test_both_ends_of_a_step_see_the_same_noise_and_leave_one_trace() -> None:
    NOISE.clear()
    server, module = FederatedServer(FedPD(oracle="II"), local_steps=3, evaluate_every=0, seed=1), Noisy()
    trainer = quiet_trainer(server, 2, limit_val_batches=0)
    trainer.fit(module, datamodule=classification(drop_last=True))
    assert len(NOISE) == 2 * 4 * 3 * 2
    assert NOISE[::2] == NOISE[1::2]
    assert len(set(NOISE)) == len(NOISE) // 2
    assert int(module.steps_seen) == int(module.net[1].num_batches_tracked) == 2 * 3
    assert server.report is not None
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(server.report.local_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("module", "options", "about"),
    [
        (lambda: Net(optimizer="adam"), {}, r"must be plain SGD.*got Adam\. FedPD\(oracle=\"II\"\) minimises"),
        (lambda: Net(optimizer="momentum"), {}, "must be plain SGD.*got SGD with momentum"),
        (Net, {"accumulate_grad_batches": 2}, r"changes with every batch\. Use accumulate_grad_batches=1"),
    ],
    ids=["Adam", "momentum", "accumulation"],
)
def test_steps_that_minimise_no_linearised_model_are_refused(module: Any, options: Any, about: str) -> None:
    model = module()
    before = x_of(model).clone()
    with pytest.raises((ValueError, RuntimeError), match=about):
        quiet_trainer(FedPD(oracle="II"), 1, **options).fit(model, datamodule=classification())
    assert torch.equal(x_of(model), before)

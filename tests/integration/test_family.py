"""FedADMM's relatives, corrected and proximal steps through `Trainer.fit`: iterates, traffic, lean steps, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import LeastSquares, Net, Witness, classification, least_squares, quiet_trainer, x_of
from torch import Tensor

from lightning_fed import FederatedServer, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import (
    Algorithm,
    Compressed,
    FedAdam,
    FedADMM,
    FedAvgM,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedNova,
    FedPD,
    FedSplit,
    FedYogi,
    ParallelDRS,
    Scaffold,
)
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.prox import L1, Box
from lightning_fed.sampling import Full, Uniform
from lightning_fed.transforms import TopK

ROUNDS, STEPS, LR, D = 6, 3, 0.1, 4
PARTIAL: list[Algorithm] = [
    FedDRII(eta_hat=0.5, g=L1(0.1)),
    FedDRII(eta_hat=0.5, g=L1(0.1), mode="upload_first", start="server"),
    FedDyn(alpha=2.0),
    Scaffold(option=1),
    Scaffold(option=2, server_lr=0.7),
    FedMid(g=L1(0.1), server_lr=0.8),
    FedDualAvg(g=L1(0.1), weights="samples"),
    FedAvgM(),
    FedAdam(server_lr=0.1),
    FedNova(stragglers=0.6),
    FedNova(mu=2.0, stragglers=0.6),
]
EVERYBODY: list[Algorithm] = [
    ParallelDRS(eta_hat=0.5, alpha=1.5, g=Box(-0.2, 0.2)),
    FedPD(eta_hat=0.5, skip=0.5, seed=3),
    FedPD(eta_hat=0.5, skip=0.3, oracle="II", refresh_every=3),
    FedSplit(s=0.5),
    FedLin(),
    FedLin(client_k=2, server_k=1),
]
FAMILY = [*PARTIAL, *EVERYBODY]


@pytest.mark.parametrize("algorithm", FAMILY, ids=repr)
def test_fit_gives_the_iterates_of_simulate(algorithm: Algorithm) -> None:
    data, quadratics = least_squares()
    module, witness = LeastSquares(D, LR), Witness()
    sampler = Full() if algorithm.traits.everybody else Uniform(2)
    server = FederatedServer(algorithm, sampler=sampler, local_steps=STEPS, evaluate_every=0, seed=7)
    quiet_trainer(server, ROUNDS, callbacks=[witness]).fit(module, datamodule=data)

    how = {"solver": GradientDescent(STEPS, LR), "sampler": sampler, "seed": 7}
    history = simulate(algorithm, quadratics, witness.x0, rounds=ROUNDS, **how)
    assert len(witness.x_bar) == ROUNDS
    assert not torch.allclose(history.x_bar, witness.x0, atol=1e-2)
    for k, x_bar in enumerate(witness.x_bar, start=1):
        assert torch.allclose(x_bar, history.server[k].x_bar, atol=1e-12, rtol=0), f"round {k}"
    assert server.federation is not None
    for name, value in vars(history.server[-1]).items():
        assert torch.allclose(getattr(server.federation.server, name), value, atol=1e-12, rtol=0), name
    for cid, state in enumerate(history.clients[-1]):
        for name, value in vars(state).items():
            ours = getattr(server.federation.store[cid].state, name)
            assert torch.allclose(ours, value, atol=1e-12, rtol=0), (cid, name)


def trained(algorithm: Algorithm, rounds: int = 4, **kwargs: Any) -> Tensor:
    server = FederatedServer(algorithm, local_steps=4, evaluate_every=0, seed=1)
    module = Net()
    trainer = quiet_trainer(server, rounds, precision="64-true", limit_val_batches=0, **kwargs)
    trainer.fit(module, datamodule=classification(drop_last=True))
    return x_of(module)


@pytest.mark.parametrize("start", ["local", "server", "centre"])
def test_fedadmm_is_fedpd_is_feddyn_on_a_network_with_everybody(start: Any) -> None:
    admm = trained(FedADMM(eta=2.0, start=start))
    assert float((admm - x_of(Net().double())).abs().max()) > 1e-2
    for other in (FedPD(eta_hat=0.5, start=start), FedDyn(alpha=2.0, start=start)):
        assert float((trained(other) - admm).abs().max()) < 1e-10


class Listener(pl.Callback):
    """Does nothing, but has to be called, so that steps are not lean."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


@pytest.mark.parametrize("scheduler", [None, "step"])
@pytest.mark.parametrize(
    "algorithm", [FedMid(L1(1e-2)), FedDualAvg(L1(1e-2)), Scaffold(1), Scaffold(2), FedPD(oracle="II")], ids=repr
)
def test_lean_and_full_steps_give_the_same_bits(algorithm: Algorithm, scheduler: str | None) -> None:
    def run(*callbacks: pl.Callback) -> dict[str, Tensor]:
        cohort = None if algorithm.traits.everybody else 2
        server = FederatedServer(algorithm, clients_per_round=cohort, local_steps=4, evaluate_every=0)
        trainer = quiet_trainer(server, 3, callbacks=callbacks, limit_val_batches=0)
        trainer.fit(Net(dropout=0.3, scheduler=scheduler), datamodule=classification(drop_last=True))
        assert server.federation is not None
        return dict(vars(server.federation.server))

    lean, hooked = run(), run(Listener())
    assert [name for name in lean if not torch.equal(lean[name], hooked[name])] == []


class Traffic(FederatedCallback):
    """Bytes of every round, down and up, in vectors of 8-byte scalars per client."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = [(0.0, 0.0)]

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.seen.append((report.metrics["bytes_down"], report.metrics["bytes_up"]))

    def models(self, clients: int, scalars: int, before: tuple[float, float] = (0.0, 0.0)) -> list[list[float]]:
        rounds = np.diff(np.array([before, *self.seen[1:]]), axis=0)
        return (rounds / (8 * scalars * clients)).tolist()


def traffic_of(algorithm: Algorithm, rounds: int = 3) -> Traffic:
    traffic = Traffic()
    cohort = None if algorithm.traits.everybody else 2
    server = FederatedServer(algorithm, clients_per_round=cohort, local_steps=1, evaluate_every=0)
    quiet_trainer(server, rounds, callbacks=[traffic]).fit(LeastSquares(D, LR), datamodule=least_squares()[0])
    return traffic


SCALAR = 1 / D  # the length of the local steps goes up with the vector


@pytest.mark.parametrize(
    ("algorithm", "down", "up"),
    [
        (FedDRII(), 1, 1),
        (FedDRII(mode="upload_first"), 1, 1),
        (ParallelDRS(), 1, 1),
        (FedPD(), 1, 1),
        (FedDyn(), 1, 1),
        (FedSplit(s=0.5), 1, 1),
        (Scaffold(1), 2, 2),
        (Scaffold(2), 2, 2),
        (FedMid(), 1, 1 + SCALAR),
        (FedNova(), 1, 1 + SCALAR),
        (FedYogi(), 1, 1),
        (FedDualAvg(), 1, 1 + SCALAR),
    ],
    ids=repr,
)
def test_a_round_costs_as_many_models_as_the_table_says(algorithm: Algorithm, down: float, up: float) -> None:
    clients = 5 if algorithm.traits.everybody else 2
    assert traffic_of(algorithm).models(clients, D) == [[down, up]] * 3


def test_the_local_models_of_a_round_with_two_exchanges_are_those_of_its_local_steps() -> None:
    server = FederatedServer(FedLin(), local_steps=2)
    quiet_trainer(server, 1).fit(LeastSquares(D, LR), datamodule=least_squares()[0])
    assert server.report is not None
    assert server.report.metrics["primal_residual"] > 1e-3


def test_fedlin_costs_two_models_each_way_and_one_up_before_the_first_round() -> None:
    start = (0.0, 5 * 8.0 * D)  # gradients at x0, which everybody has
    assert traffic_of(FedLin()).models(5, D, start) == [[2, 2]] * 3


class Coins(FedPD):
    """Communicate, skip, skip, communicate, communicate."""

    def exchanges(self, round: int) -> bool:
        return round in (0, 3, 4)


def test_fedpd_is_charged_a_model_each_way_in_rounds_with_an_exchange_and_nothing_in_others() -> None:
    seen = traffic_of(Coins(eta_hat=0.5), rounds=5).models(5, D)
    assert seen == [[1, 1], [0, 0], [0, 0], [1, 1], [1, 1]]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        loss, optimizer = super().training_step(list(batch), batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (Scaffold(2), r"Scaffold\(option=2\) computes gradients from the local steps"),
        (FedMid(L1(0.1)), "FedMid takes the prox of g for the length of an SGD step"),
        (FedDualAvg(L1(0.1)), "FedDualAvg sums plain gradients in its dual variable"),
        (FedNova(mu=0.1), "FedNova divides by the length of the local steps, which it knows with mu > 0 only for"),
    ],
    ids=["Scaffold", "FedMid", "FedDualAvg", "FedNova"],
)
@pytest.mark.parametrize(
    ("module", "options", "found"),
    [
        (lambda: Net(optimizer="momentum"), {}, "SGD with momentum"),
        (lambda: Net(optimizer="adam"), {}, "Adam"),
        (Net, {"gradient_clip_val": 0.1}, "gradient clipping"),
        (Manual, {}, "manual optimisation"),
    ],
    ids=["momentum", "Adam", "clipping", "manual"],
)
def test_local_steps_that_are_not_plain_sgd_are_refused_with_the_reason(
    algorithm: Algorithm, why: str, module: Any, options: dict[str, Any], found: str
) -> None:
    model = module()
    before = x_of(model).clone()
    with pytest.raises(ValueError, match=rf"must be plain SGD with one learning rate, got {found}\. {why}"):
        quiet_trainer(FederatedServer(algorithm), 1, **options).fit(model, datamodule=classification())
    assert torch.equal(x_of(model), before)


class Decaying(LeastSquares):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=0.3)


def test_weight_decay_of_a_dual_variable_is_refused() -> None:
    about = r"must have no weight_decay, got 0\.3\. FedDualAvg's optimiser moves the dual variable.*g=SquaredL2\(c\)"
    for algorithm in (FedDualAvg(L1(0.1)), Compressed(FedDualAvg(), TopK(2))):
        with pytest.raises(ValueError, match=about):
            quiet_trainer(algorithm, 1).fit(Decaying(D, LR), datamodule=least_squares()[0])


@pytest.mark.parametrize("algorithm", [FedMid(L1(0.1)), Scaffold(1), Scaffold(2), FedLin(), FedADMM(2.0)], ids=repr)
def test_weight_decay_of_the_model_is_a_part_of_every_clients_loss(algorithm: Algorithm) -> None:
    data, quadratics = least_squares()
    ridge = [Quadratic(f.A + 0.3 * torch.eye(D).double(), f.b, f.num_examples) for f in quadratics]
    server, witness = FederatedServer(algorithm, local_steps=STEPS, evaluate_every=0), Witness()
    quiet_trainer(server, ROUNDS, callbacks=[witness]).fit(Decaying(D, LR), datamodule=data)
    history = simulate(algorithm, ridge, witness.x0, rounds=ROUNDS, solver=GradientDescent(STEPS, LR))
    assert torch.allclose(witness.x_bar[-1], history.x_bar, atol=1e-12, rtol=0)


@pytest.mark.parametrize("algorithm", EVERYBODY, ids=lambda a: type(a).__name__)
def test_a_part_of_the_clients_is_refused_where_everybody_is_needed(algorithm: Algorithm) -> None:
    class Untouched(Net):
        def configure_optimizers(self) -> Any:
            raise AssertionError("something ran")

    server = FederatedServer(algorithm, clients_per_round=3)
    with pytest.raises(ValueError, match=rf"{type(algorithm).__name__} needs every client in every round.*FedADMM"):
        quiet_trainer(server, 1).fit(Untouched(), datamodule=classification())
    assert server.federation is None
    quadratics = least_squares()[1]
    with pytest.raises(ValueError, match=r"needs every client in every round; round 1 has 2 of 5\."):
        simulate(algorithm, quadratics, cohorts=[range(5), [0, 3]])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_scaffold_with_gradients_of_its_own_learns_with_any_optimiser(optimizer: str) -> None:
    module, losses = Net(optimizer=optimizer, lr=0.05), []

    class Losses(FederatedCallback):
        def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
            losses.append(report.local_loss)

    server = FederatedServer(Scaffold(1), clients_per_round=3, local_epochs=1, evaluate_every=0)
    quiet_trainer(server, 12, callbacks=[Losses()], limit_val_batches=0).fit(module, datamodule=classification())
    assert losses[-1] < 0.8 * losses[0]
    assert server.federation is not None
    c_i = [server.federation.store[cid].state.c_i for cid in server.federation.store]
    assert torch.allclose(server.federation.server.c, sum(c_i).double() / 4, atol=1e-6)


@pytest.mark.parametrize("algorithm", EVERYBODY, ids=repr)
def test_fast_dev_run_asks_everybody_where_everybody_is_needed(algorithm: Algorithm) -> None:
    def run(**kwargs: Any) -> tuple[list[Any], Tensor]:
        server, module = FederatedServer(algorithm, evaluate_every=0), LeastSquares(D, LR)
        quiet_trainer(server, 1, **kwargs).fit(module, datamodule=least_squares()[0])
        assert server.report is not None
        return server.report.cohort, x_of(module)

    (cohort, fast), (everybody, slow) = run(fast_dev_run=True), run(limit_train_batches=1)
    assert cohort == everybody == list(range(5))
    assert torch.equal(fast, slow)

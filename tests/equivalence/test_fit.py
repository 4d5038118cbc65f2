"""The same algorithm objects give the same iterates through `simulate` and through `Trainer.fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.marks import quick_first
from helpers.modules import LeastSquares, least_squares, quiet_trainer, x_of
from torch import Tensor

from lightning_fed import FederatedServer, GradientDescent, simulate
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedProx
from lightning_fed.algorithms.fedavg import Message
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.core import Reply
from lightning_fed.datamodules import Synthetic
from lightning_fed.engines import ClientError
from lightning_fed.models import MLP
from lightning_fed.prox import L1, Box
from lightning_fed.sampling import Bernoulli, Full, Sampler, Uniform

ROUNDS, STEPS, LR = 12, 3, 0.1


class Trace(FederatedCallback):
    def __init__(self) -> None:
        self.x_bar: list[Tensor] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.x_bar.append(x_of(module))


@pytest.mark.parametrize(
    "algorithm",
    [
        FedADMM(eta=2.0),
        FedADMM(eta=2.0, g=L1(0.1), weights="samples", start="server"),
        FedADMM(eta=1.0, alpha=1.5, g=Box(-0.2, 0.2), start="centre", project_initial=True),
        FedDR(eta_hat=0.5, g=L1(0.1)),
        FedDR(eta_hat=0.5, alpha=1.5, init="prox", weights="samples"),
        FedAvg(),
        FedAvg(server_lr=0.7, weights="uniform"),
        FedProx(mu=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("sampler", [Full(), Uniform(2), Bernoulli(0.3)], ids=repr)
def test_fit_gives_the_iterates_of_simulate(algorithm: Algorithm, sampler: Sampler) -> None:
    data, quadratics = least_squares()
    module, trace = LeastSquares(4, LR), Trace()
    x0 = x_of(module)
    server = FederatedServer(algorithm, sampler=sampler, local_steps=STEPS, evaluate_every=0, seed=7)
    quiet_trainer(server, ROUNDS, callbacks=[trace]).fit(module, datamodule=data)

    history = simulate(
        algorithm, quadratics, x0, rounds=ROUNDS, solver=GradientDescent(STEPS, LR), sampler=sampler, seed=7
    )
    for k, x_bar in enumerate(trace.x_bar, start=1):
        assert torch.allclose(x_bar, history.server[k].x_bar, atol=1e-10, rtol=0), f"round {k}"
    assert len(trace.x_bar) == ROUNDS
    for cid, state in enumerate(history.clients[-1]):
        ours = server.federation.store[cid].state
        for name, value in vars(state).items():
            assert torch.allclose(getattr(ours, name), value, atol=1e-10, rtol=0), (cid, name)


@pytest.mark.parametrize("start", quick_first(["server", "local", "centre"]))
def test_fedadmm_and_feddr_coincide_on_the_mlp(start: Any) -> None:
    def run(algorithm: Algorithm) -> list[Tensor]:
        pl.seed_everything(0, verbose=False)
        trace = Trace()
        server = FederatedServer(algorithm, clients_per_round=10, local_steps=20, evaluate_every=0)
        trainer = quiet_trainer(server, 20, callbacks=[trace], precision="64-true", limit_val_batches=0)
        trainer.fit(MLP(), datamodule=Synthetic(1, 1, dtype="float64"))
        return trace.x_bar

    admm, dr = run(FedADMM(eta=1.0, start=start)), run(FedDR(eta_hat=1.0, start=start))
    assert len(admm) == 20
    assert max(float((a - b).abs().max()) for a, b in zip(admm, dr, strict=True)) < 1e-9
    assert float((admm[-1] - admm[0]).abs().max()) > 1e-2


@dataclass(frozen=True)
class Decay(FedAvg):
    """A question with a penalty but no centre: about zero."""

    def client_step(self, client: Any, down: Any, local: Any) -> Any:
        sol = local.solve(down.x_bar, rho=0.5)
        return Reply(client, Message(sol.x - down.x_bar), sol.x)


class Forgets(FedAvg):
    def client_step(self, client: Any, down: Any, local: Any) -> Any:
        return None


def test_an_algorithm_that_returns_no_reply_is_named_in_the_fit_too() -> None:
    server = FederatedServer(Forgets(), evaluate_every=0)
    with pytest.raises(ClientError, match=r"round 0, client 0: TypeError: Forgets.client_step must return a Reply"):
        quiet_trainer(server, 1).fit(LeastSquares(4, LR), datamodule=least_squares()[0])


def test_a_penalty_without_a_centre_is_one_about_zero_in_both() -> None:
    data, quadratics = least_squares()
    module = LeastSquares(4, LR)
    x0 = x_of(module)
    quiet_trainer(FederatedServer(Decay(), local_steps=STEPS, evaluate_every=0), 5).fit(module, datamodule=data)
    history = simulate(Decay(), quadratics, x0, rounds=5, solver=GradientDescent(STEPS, LR))
    assert torch.allclose(x_of(module), history.x_bar, atol=1e-10, rtol=0)
    plain = simulate(FedAvg(), quadratics, x0, rounds=5, solver=GradientDescent(STEPS, LR))
    assert not torch.allclose(history.x_bar, plain.x_bar, atol=1e-3)

"""FedNova through Trainer.fit: local momentum and step sizes that change are counted, other optimisers refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers.modules import LeastSquares, Witness, least_squares, quiet_trainer

from lightning_fed import FederatedServer, GradientDescent, simulate
from lightning_fed.algorithms import Compressed, FedNova
from lightning_fed.local.steps.in_place import FusedStep
from lightning_fed.sampling import Uniform
from lightning_fed.transforms import TopK

ROUNDS, STEPS, LR, D = 4, 5, 0.1, 4


class Optimised(LeastSquares):
    """Trained by any optimiser, perhaps with a schedule by step."""

    stackable = True

    def __init__(self, kind: Any = torch.optim.SGD, rates: tuple[float, ...] = (), **settings: Any) -> None:
        super().__init__(D, LR)
        self.kind, self.rates, self.settings = kind, rates, settings

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=self.lr, **self.settings)
        if not self.rates:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: self.rates[min(k, len(self.rates) - 1)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("tau_eff", ["steps", "norm"])
def test_local_momentum_is_counted_as_in_simulate(engine: Any, tau_eff: Any) -> None:
    algorithm, (data, quadratics), witness = FedNova(stragglers=0.6, tau_eff=tau_eff), least_squares(), Witness()
    how: dict[str, Any] = {"sampler": Uniform(3), "seed": 7}
    server = FederatedServer(algorithm, local_steps=STEPS, evaluate_every=0, engine=engine, compile=False, **how)
    quiet_trainer(server, ROUNDS, callbacks=[witness]).fit(Optimised(momentum=0.9), datamodule=data)
    solver = GradientDescent(STEPS, LR, momentum=0.9)
    history = simulate(algorithm, quadratics, witness.x0, rounds=ROUNDS, solver=solver, **how)
    steps = [[answer.steps for answer in answers.values()] for answers in history.answers]
    assert any(len(set(taken)) > 1 for taken in steps)
    for k, x_bar in enumerate(witness.x_bar, start=1):
        assert torch.allclose(x_bar, history.server[k].x_bar, atol=1e-12, rtol=0), f"round {k}"


def test_steps_in_place_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (data, quadratics), witness, algorithm = least_squares(), Witness(), FedNova(mu=2.0, stragglers=0.6)
    monkeypatch.setattr("lightning_fed.trainer.eligibility.LARGE_MODEL", 1)
    with mock.patch.object(FusedStep, "_update", autospec=True, side_effect=FusedStep._update) as taken:
        server = FederatedServer(algorithm, local_steps=STEPS, evaluate_every=0, seed=7, engine="sequential")
        quiet_trainer(server, ROUNDS, callbacks=[witness]).fit(Optimised(), datamodule=data)
    assert taken.called
    history = simulate(algorithm, quadratics, witness.x0, rounds=ROUNDS, solver=GradientDescent(STEPS, LR), seed=7)
    assert torch.allclose(witness.x_bar[-1], history.x_bar, atol=1e-12, rtol=0)


def test_a_schedule_by_step_is_counted_step_by_step() -> None:
    (data, quadratics), witness, mu = least_squares(), Witness(), 2.0
    server = FederatedServer(FedNova(mu=mu, weights="uniform"), local_steps=3, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[witness]).fit(Optimised(rates=(1.0, 0.5, 0.25)), datamodule=data)
    rates, x0 = (LR, LR / 2, LR / 4), witness.x0
    changes = []
    for f in quadratics:
        x = x0
        for lr in rates:
            x = x - lr * (f.grad(x) + mu * (x - x0))
        changes.append(x - x0)
    weight = rates[0] * (1 - mu * rates[1]) * (1 - mu * rates[2]) + rates[1] * (1 - mu * rates[2]) + rates[2]
    expected = x0 + sum(rates) * torch.stack(changes).mean(0) / weight
    assert torch.allclose(witness.x_bar[0], expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("module", "options", "found"),
    [
        (lambda: Optimised(torch.optim.Adam), {}, "Adam"),
        (lambda: Optimised(momentum=0.9, nesterov=True), {}, "SGD with Nesterov's or dampened momentum"),
        (lambda: Optimised(momentum=0.9, dampening=0.1), {}, "SGD with Nesterov's or dampened momentum"),
        (Optimised, {"gradient_clip_val": 0.1}, "gradient clipping"),
    ],
    ids=["Adam", "Nesterov", "dampened", "clipping"],
)
@pytest.mark.parametrize("algorithm", [FedNova(), Compressed(FedNova(), TopK(2))], ids=["plain", "compressed"])
def test_steps_whose_weights_are_unknown_are_refused(algorithm: Any, module: Any, options: Any, found: str) -> None:
    about = rf"must be SGD with one learning rate, got {found}\. FedNova divides by the length of the local steps"
    with pytest.raises(ValueError, match=about):
        quiet_trainer(algorithm, 1, **options).fit(module(), datamodule=least_squares()[0])

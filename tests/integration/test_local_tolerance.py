"""`FederatedServer(local_tolerance=...)`: a visit ends when the local problem is solved well enough."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.evaluated import Manual, ManualValidated, metrics_of
from helpers.modules import LeastSquares, Net, Witness, classification, least_squares, quiet_trainer, x_of
from torch import Tensor, nn

from lightning_fed import FederatedServer, GradientDescent, simulate
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR, FedMid, FedPD, Scaffold
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.sampling import Full, Uniform
from lightning_fed.theory import Absolute, Relative, Summable, Tolerance

ETA, LR = 4.0, 0.05


class Steps(FederatedCallback):
    """Local steps and local models of every visit, and the dual variable it began with."""

    def __init__(self) -> None:
        self.visits: list[dict[str, Any]] = []

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        federation = trainer.fit_loop.server.federation
        z_i = federation.recall(visit.client).z_i
        x_bar = federation.server.x_bar
        self.visits.append(
            {"client": visit.client, "steps": reply.steps, "x_i": x_of(module), "z_i": z_i, "x_bar": x_bar}
        )


@pytest.mark.parametrize("tolerance", [0.05, Absolute(0.02, L=3.5), Relative(0.2), Summable(1e-2)], ids=repr)
@pytest.mark.parametrize("sampler", [Full(), Uniform(2)], ids=repr)
def test_fit_stops_where_simulate_stops(tolerance: float | Tolerance, sampler: Any) -> None:
    data, quadratics = least_squares()
    module, witness = LeastSquares(4, LR), Witness()
    x0, algorithm = x_of(module), FedADMM(eta=ETA, start="local")
    server = FederatedServer(
        algorithm, sampler=sampler, local_epochs=200, local_tolerance=tolerance, evaluate_every=0, seed=7
    )
    quiet_trainer(server, 8, callbacks=[witness]).fit(module, datamodule=data)
    solver = GradientDescent(200, LR, tolerance)
    history = simulate(algorithm, quadratics, x0, rounds=8, solver=solver, sampler=sampler, seed=7)
    assert len({answer.steps for answers in history.answers for answer in answers.values()}) > 2
    for x_bar, state in zip(witness.x_bar, history.server[1:], strict=True):
        torch.testing.assert_close(x_bar, state.x_bar, rtol=0, atol=1e-12)


def test_the_point_reached_by_mini_batches_fulfils_the_certificate() -> None:
    data, watched, module = classification(), Steps(), Net(lr=0.02)
    server = FederatedServer(
        FedADMM(eta=8.0, start="local"), clients_per_round=2, local_epochs=60, local_tolerance=0.2, evaluate_every=0
    )
    quiet_trainer(server, 3, callbacks=[watched], limit_val_batches=0).fit(module, datamodule=data)
    assert len(watched.visits) == 6
    assert 0 < min(v["steps"] for v in watched.visits) <= max(v["steps"] for v in watched.visits) < 60 * 3
    for visit in watched.visits:
        inputs, labels = data.client_dataset(visit["client"]).tensors
        assert visit["steps"] % (-(-len(labels) // 4)) == 0  # whole epochs of batches of 4
        nn.utils.vector_to_parameters(visit["x_i"], module.parameters())
        loss = nn.functional.cross_entropy(module.net.eval()(inputs), labels)
        slope = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        assert float((slope + visit["z_i"] + 8.0 * (visit["x_i"] - visit["x_bar"])).norm()) <= 0.2 * (1 + 1e-4)


def test_a_summable_schedule_reaches_the_minimiser_and_a_coarse_tolerance_does_not() -> None:
    data, quadratics = least_squares()

    def final(tolerance: float | Tolerance) -> float:
        module = LeastSquares(4, 0.12)
        server = FederatedServer(FedADMM(eta=ETA), local_epochs=500, local_tolerance=tolerance, evaluate_every=0)
        quiet_trainer(server, 80).fit(module, datamodule=data)
        return float((sum(f.grad(x_of(module)) for f in quadratics) / 5).norm())

    assert final(Summable(D=1e-3)) < 1e-3
    assert final(1.0) > 0.02


def test_a_tolerance_never_reached_changes_nothing_but_the_log() -> None:
    def fit(**kwargs: Any) -> tuple[Tensor, dict[str, float]]:
        module = Net(optimizer="momentum", dropout=0.3, norm=True)
        server = FederatedServer(FedADMM(eta=1.0), clients_per_round=2, local_epochs=2, **kwargs)
        trainer = quiet_trainer(server, 3)
        trainer.fit(module, datamodule=classification(drop_last=True))
        return torch.cat([t.double().flatten() for t in module.state_dict().values()]), metrics_of(trainer)

    plain, metrics = fit()
    with pytest.warns(UserWarning, match=r"client 'c\d': after \d local steps, all that are allowed") as seen:
        watched, more = fit(local_tolerance=1e-12)
    assert sum("all that are allowed" in str(w.message) for w in seen) == 1
    assert torch.equal(plain, watched)
    known = {name: value for name, value in more.items() if name in metrics and "seconds" not in name}
    assert known == {name: value for name, value in metrics.items() if "seconds" not in name}
    new = {name.split("/")[1]: value for name, value in more.items() if name not in metrics}
    assert new.keys() == {"steps_by_client", "local_residual", "unreached"}
    assert new["unreached"] == 2
    assert new["local_residual"] > 0


def test_a_model_that_is_good_enough_is_not_touched() -> None:
    module = LeastSquares(4, LR)
    x0 = x_of(module)
    trainer = quiet_trainer(FederatedServer(FedAvg(), local_epochs=3, local_tolerance=1e6), 2)
    trainer.fit(module, datamodule=least_squares()[0])
    assert torch.equal(x_of(module), x0)
    assert metrics_of(trainer)["federated/steps_by_client"] == 0


def test_what_was_asked_is_known_after_a_visit() -> None:
    asked = []

    class Curious(FederatedCallback):
        def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
            asked.append((visit.question, visit.certificate))

    algorithms = [FedADMM(eta=3.0), FedDR(eta_hat=0.5), FedPD(eta_hat=0.25), FedAvg(), FedMid()]
    for algorithm in algorithms:
        server = FederatedServer(algorithm, local_steps=1, evaluate_every=0)
        quiet_trainer(server, 1, callbacks=[Curious()]).fit(LeastSquares(4, LR), datamodule=least_squares(1)[0])
    assert [question and question.rho for question, _ in asked] == [3.0, 2.0, 4.0, 0.0, None]
    assert all(certificate is None for _, certificate in asked)
    torch.testing.assert_close(asked[0][0].center, torch.linspace(-1, 1, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": Scaffold()}, r"Scaffold asks for local steps.*local_tolerance=Absolute\(epsilon=0\.1, L=None\)"),
        ({"algorithm": FedMid()}, r"FedMid asks for local steps, not for a minimiser"),
        ({"local_tolerance": Absolute(0.1, L=2.0)}, r"rho must be finite and exceed L = 2, got 1\.0\. Raise the pen"),
        ({"local_tolerance": -1.0}, r"Absolute\.epsilon must be positive, got -1\.0"),
    ],
    ids=str,
)
def test_tolerances_that_mean_nothing_are_refused_before_any_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedServer(**{"algorithm": FedADMM(eta=1.0), "local_tolerance": 0.1, **arguments})


def test_a_module_without_a_loss_is_refused_and_one_with_a_validation_step_is_not() -> None:
    def fit(module: pl.LightningModule) -> None:
        server = FederatedServer(FedADMM(eta=1.0), local_steps=2, local_tolerance=100.0, evaluate_every=0)
        quiet_trainer(server, 1, limit_val_batches=0).fit(module, datamodule=classification())

    with pytest.raises(ValueError, match=r"Manual reports no loss to differentiate.*or omit local_tolerance"):
        fit(Manual())
    fit(ManualValidated())

"""`TheoryMeter`: what is logged is what the formulas say, nothing else changes, and warnings come once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.bowls import Bowl, bowls
from helpers.evaluated import Manual, blank, metrics_of, rows_of
from helpers.modules import Net, Witness, classification, quiet_trainer
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedPD, FedProx, FedSplit
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback, TheoryMeter
from lightning_fed.engines import ClientError
from lightning_fed.evaluation import evaluate as measure
from lightning_fed.prox import L1

ONE, TWO = [4.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0]  # of rank one: power iteration is exact
ETA, LR = 10.0, 0.02


class Asked(FederatedCallback):
    """Answers of the cohort, with the state of round k that they were asked from."""

    def __init__(self) -> None:
        self.answers: list[list[tuple[int, Tensor, Tensor, Tensor]]] = []

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self.answers.append([])

    def on_client_end(self, trainer: pl.Trainer, module: Any, visit: Any, reply: Any) -> None:
        federation = trainer.fit_loop.server.federation
        z_i = federation.recall(visit.client).z_i
        self.answers[-1].append((visit.client, module.x().detach().clone(), z_i, federation.server.x_bar))


def fit(algorithm: Algorithm, *callbacks: Any, rounds: int = 3, lr: float = LR, **kwargs: Any) -> tuple[Any, Bowl]:
    module, settings = Bowl(lr), {"local_steps": 4, "evaluate_every": 0, **kwargs}
    trainer = quiet_trainer(FederatedServer(algorithm, **settings), rounds, callbacks=list(callbacks))
    trainer.fit(module, datamodule=bowls(ONE, TWO, batch_size=5))
    return trainer, module


def slopes(x: Tensor) -> list[Tensor]:
    """Gradients of both clients' losses in closed form."""
    datasets = bowls(ONE, TWO).splits["train"].values()
    return [data.tensors[0].mean(0) @ x - data.tensors[1].mean(0) for data in datasets]


def said(seen: Any) -> list[str]:
    return [str(warning.message) for warning in seen if "L is at least" in str(warning.message)]


def test_every_number_is_that_of_its_formula() -> None:
    asked, g = Asked(), L1(0.3)
    trainer, module = fit(FedADMM(eta=ETA, g=g), asked, TheoryMeter())
    logged = {name.split("/")[1]: value for name, value in metrics_of(trainer).items() if name.startswith("theory/")}
    x = module.x().detach()
    step = x - sum(slopes(x)) / 2 / ETA
    mapping = ETA * (x - step.sign() * (step.abs() - 0.3 / ETA).clamp(min=0))
    residuals = [float((slopes(x_i)[i] + z_i + ETA * (x_i - x_bar)).norm()) for i, x_i, z_i, x_bar in asked.answers[-1]]
    assert len(residuals) == 2
    expected = {
        "L": 4.0,
        "eta_min": 2.397180873 * 4,
        "eta_over_bound": ETA / (2.397180873 * 4),
        "lr_stability": LR * (4 + ETA),
        "stationarity": float(mapping.norm()),
        "residual_mean": sum(residuals) / 2,
        "residual_max": max(residuals),
        "inexactness_mean": sum(residuals) / 2 / (ETA - 4),
        "inexactness_max": max(residuals) / (ETA - 4),
    }
    assert logged == pytest.approx(expected, rel=1e-8)
    assert min(residuals) > 1e-3


def test_it_measures_every_so_many_rounds_the_first_and_the_last(tmp_path: Path) -> None:
    module, server = Bowl(LR), FederatedServer(FedADMM(eta=ETA), local_steps=1, evaluate_every=0, figure=False)
    logger = CSVLogger(tmp_path, name="csv", flush_logs_every_n_steps=1)
    trainer = quiet_trainer(server, 6, callbacks=[TheoryMeter(every=3)], logger=logger)
    trainer.fit(module, datamodule=bowls(ONE, TWO))
    rows = rows_of(tmp_path / "csv" / "version_0" / "metrics.csv")
    measured = [int(row["step"]) for row in rows if not blank(row.get("theory/L", ""))]
    assert measured == [0, 3, 5]


def test_the_gradient_mapping_is_worked_out_once_for_the_meter_and_the_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, original = [], measure.full_gradient
    monkeypatch.setattr(measure, "full_gradient", lambda *args: calls.append(1) or original(*args))
    evaluation = ClientEvaluation(gradient_mapping=True)
    trainer, _ = fit(FedADMM(eta=ETA), TheoryMeter(every=1), evaluation, rounds=3)
    metrics = metrics_of(trainer)
    assert len(calls) == 3
    assert metrics["theory/stationarity"] == metrics["federated/gradient_mapping"] > 0


def test_an_eta_that_is_planned_is_judged_once_it_is_a_number() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer, _ = fit(FedADMM(eta="auto"), TheoryMeter(every=1), rounds=1)
    eta = trainer.fit_loop.server.federation.algorithm.eta
    assert said(seen) == []  # before round 0 its penalty is not known, and not 0
    assert metrics_of(trainer)["theory/eta_over_bound"] == pytest.approx(eta / (2.397180873 * 4), rel=1e-6)


def test_the_certificates_of_a_tolerance_are_taken_over() -> None:
    asked = Asked()
    trainer, _ = fit(FedADMM(eta=ETA), asked, TheoryMeter(), local_steps=None, local_epochs=99, local_tolerance=0.05)
    metrics = metrics_of(trainer)
    residuals = [float((slopes(x_i)[i] + z_i + ETA * (x_i - x_bar)).norm()) for i, x_i, z_i, x_bar in asked.answers[-1]]
    assert metrics["theory/residual_max"] == metrics["federated/local_residual"] == pytest.approx(max(residuals))
    assert metrics["theory/residual_max"] <= 0.05


@pytest.mark.parametrize(
    ("algorithm", "bound"),
    [
        (FedDR(eta_hat=0.01), 2.397180873 * 4),
        (FedDR(eta_hat=0.01, alpha=1.5), 16.0),
        (FedPD(eta_hat=0.01), 2.397180873 * 4),
        (FedProx(mu=1.0), None),
        (FedSplit(s=0.01), None),
        (FedAvg(), None),
    ],
    ids=repr,
)
def test_the_bound_is_told_of_those_it_is_about(algorithm: Algorithm, bound: float | None) -> None:
    trainer, _ = fit(algorithm, TheoryMeter(), rounds=1, lr=0.005)
    metrics = metrics_of(trainer)
    assert metrics.get("theory/eta_min") == (None if bound is None else pytest.approx(bound))
    assert ("theory/eta_over_bound" in metrics) == (bound is not None)
    assert metrics["theory/lr_stability"] == pytest.approx(0.005 * (4 + algorithm.traits.penalty))
    assert ("theory/inexactness_max" in metrics) == (algorithm.traits.penalty > 4)
    assert metrics["theory/residual_max"] > 0


def test_a_small_penalty_is_warned_of_once_with_its_bound() -> None:
    with pytest.warns(UserWarning, match="theorem's bound") as seen:
        trainer, _ = fit(FedADMM(eta=5.0), TheoryMeter(every=1))
    (message,) = said(seen)
    assert message.startswith("FedADMM's penalty 5 is below the theorem's bound 9.589, as L is at least 4 on 2 clients")
    assert metrics_of(trainer)["theory/eta_over_bound"] == pytest.approx(5 / (2.397180873 * 4))


def test_an_automatic_penalty_is_judged_once_it_is_a_number() -> None:
    trainer, _ = fit(FedADMM(eta="auto"), TheoryMeter(every=1), rounds=1)  # 1 / (4 * 0.02) = 12.5
    assert metrics_of(trainer)["theory/eta_over_bound"] == pytest.approx(12.5 / (2.397180873 * 4))


def test_too_long_steps_are_warned_of_before_they_ruin_the_first_round() -> None:
    with pytest.warns(UserWarning, match="diverge") as seen, pytest.raises(ClientError):
        fit(FedADMM(eta=ETA), TheoryMeter(), lr=0.19, local_steps=2000)
    (message,) = said(seen)
    assert "lr * (L + rho) = 0.19 * (4 + 10) = 2.66 >= 2" in message
    assert "Use a learning rate below 0.1429; 1 / (L + rho) = 0.07143 is safe." in message


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_stability_is_not_told_of_other_optimisers(optimizer: str) -> None:
    module, server = Net(optimizer=optimizer, lr=100.0), FederatedServer(FedAvg(), local_steps=1, evaluate_every=0)
    trainer = quiet_trainer(server, 1, callbacks=[TheoryMeter(clients=1)], limit_val_batches=0)
    trainer.fit(module, datamodule=classification())
    assert "theory/L" in trainer.callback_metrics
    assert "theory/lr_stability" not in trainer.callback_metrics


def test_the_run_is_the_same_with_and_without_it() -> None:
    def run(*callbacks: Any) -> list[Tensor]:
        module, witness = Net(dropout=0.3, norm=True), Witness()
        server = FederatedServer(FedADMM(eta=1.0), clients_per_round=2, local_steps=3, seed=1)
        trainer = quiet_trainer(server, 3, callbacks=[witness, *callbacks])
        trainer.fit(module, datamodule=classification(drop_last=True))
        return witness.x_bar

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*theorem's bound")
        assert all(torch.equal(a, b) for a, b in zip(run(), run(TheoryMeter(every=1, clients=2)), strict=True))


def test_clients_are_drawn_from_seed_and_round_alone() -> None:
    def curvatures() -> float:
        module, server = Net(), FederatedServer(FedAvg(), local_steps=1, evaluate_every=0, seed=3)
        trainer = quiet_trainer(server, 1, callbacks=[TheoryMeter(clients=1)], limit_val_batches=0)
        trainer.fit(module, datamodule=classification(8))
        return metrics_of(trainer)["theory/L"]

    first = curvatures()
    torch.rand(5)
    assert curvatures() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, r"TheoryMeter\.every must be a whole number >= 1, got 0"),
        ({"clients": 1.5}, r"TheoryMeter\.clients must be a whole number >= 1, got 1\.5"),
        ({"gamma4": 0.25}, r"gamma4 must lie in \(0, 1/4\), got 0\.25"),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TheoryMeter(**arguments)


def test_a_module_without_a_loss_is_refused() -> None:
    server = FederatedServer(FedADMM(eta=1.0), evaluate_every=0)
    with pytest.raises(ValueError, match=r"Manual reports no loss to differentiate.*or leave TheoryMeter out"):
        quiet_trainer(server, 1, callbacks=[TheoryMeter()]).fit(Manual(), datamodule=classification())


def test_relaxation_2_has_no_bound() -> None:
    with pytest.warns(UserWarning, match="relaxation 2 is outside") as seen:
        trainer, _ = fit(FedDR(eta_hat=0.01, alpha=2.0), TheoryMeter(), rounds=1, lr=0.005)
    (message,) = said(seen)
    assert "Below 2 - 2 L / penalty = 1.92 it would be in its range" in message
    assert "theory/eta_min" not in trainer.callback_metrics
    assert metrics_of(trainer)["theory/eta_over_bound"] == 0.0

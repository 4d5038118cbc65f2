"""`OptunaPruning`: reports by round, prunes after a committed round, counts divergence as pruned."""

from __future__ import annotations

import sys
from typing import Any

import optuna
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from optuna.pruners import BasePruner, NopPruner
from optuna.trial import FrozenTrial, TrialState

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import OptunaPruning

OBJECTIVE = "federated/objective"


class After(BasePruner):
    """Prunes at the first report at or after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return (trial.last_step or 0) >= self.step


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def optimized(
    pruner: BasePruner, monitor: str = OBJECTIVE, rounds: int = 4, lr: float = 0.05, **server: Any
) -> tuple[FrozenTrial, pl.Trainer]:
    """The only trial of a study, and its trainer."""
    trainers = []

    def objective(trial: optuna.Trial) -> float:
        federated = FederatedServer(FedAvg(), seed=0, local_steps=3, **server)
        trainers.append(quiet_trainer(federated, rounds, callbacks=[OptunaPruning(trial, monitor)]))
        trainers[0].fit(Net(lr=lr), datamodule=classification(val=0.2))
        return float(trainers[0].callback_metrics[monitor])

    study = optuna.create_study(pruner=pruner)
    study.optimize(objective, n_trials=1)
    return study.trials[0], trainers[0]


def test_every_round_is_reported_and_the_trial_completes() -> None:
    trial, trainer = optimized(NopPruner())
    assert trial.state == TrialState.COMPLETE
    assert list(trial.intermediate_values) == [1, 2, 3, 4]
    assert trial.intermediate_values[4] == trial.value == float(trainer.callback_metrics[OBJECTIVE])
    assert len(set(trial.intermediate_values.values())) == 4


def test_a_pruned_trial_ends_after_the_round_is_committed() -> None:
    trial, trainer = optimized(After(2))
    assert trial.state == TrialState.PRUNED
    assert list(trial.intermediate_values) == [1, 2]
    server = next(callback for callback in trainer.callbacks if isinstance(callback, FederatedServer))
    assert server.rounds_done == 2
    shown = torch.cat([p.detach().flatten() for p in trainer.lightning_module.parameters()])
    assert torch.equal(shown, server.federation.server.x_bar)


def test_rounds_without_an_evaluation_report_nothing() -> None:
    trial, _ = optimized(NopPruner(), evaluate_every=3, rounds=4)
    assert list(trial.intermediate_values) == [3, 4]  # the last round is always evaluated


def test_a_metric_of_validation_is_reported() -> None:
    trial, trainer = optimized(NopPruner(), monitor="val_loss", rounds=2, evaluate_every=0)
    assert list(trial.intermediate_values) == [1, 2]
    assert trial.intermediate_values[2] == float(trainer.callback_metrics["val_loss"])


def test_divergence_counts_as_pruned_with_its_reason() -> None:
    reasons = []

    def objective(trial: optuna.Trial) -> float:
        server = FederatedServer(FedAvg(), seed=0, local_steps=3)
        trainer = quiet_trainer(server, 4, callbacks=[OptunaPruning(trial)])
        try:
            trainer.fit(Net(lr=float("inf")), datamodule=classification())
        except optuna.TrialPruned as error:
            reasons.append(error)
            raise
        raise AssertionError("the fit did not diverge")

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    assert study.trials[0].state == TrialState.PRUNED
    assert "round 0, client 'c0'" in str(reasons[0])
    assert "is nan" in str(reasons[0])


class Overflowing(Net):
    """Its loss in evaluation is infinite from the second round on; training stays finite."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.training or self.current_epoch < 1 else loss + torch.inf


@pytest.mark.filterwarnings("ignore:The loss of client")
def test_a_metric_that_is_not_finite_counts_as_pruned() -> None:
    trial = optuna.create_study().ask()
    trainer = quiet_trainer(FederatedServer(FedAvg(), seed=0), 4, callbacks=[OptunaPruning(trial)])
    with pytest.raises(optuna.TrialPruned, match="federated/objective is inf after 2 rounds"):
        trainer.fit(Overflowing(), datamodule=classification())
    assert list(trial.study.trials[0].intermediate_values) == [1]


def test_a_metric_that_is_never_logged_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ValueError, match=r"no round logged 'objective'. Logged metrics are: .*federated/objective"):
        optimized(NopPruner(), monitor="objective", rounds=1)


def test_without_optuna_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = optuna.create_study().ask()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r'OptunaPruning needs Optuna.*pip install "lightning-fed\[optuna\]"'):
        OptunaPruning(trial)

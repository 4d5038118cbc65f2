"""Trainers, strategies, callbacks and optimisers that do not fit rounds are refused before the first local step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.tuner import Tuner
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR, FedProx
from lightning_fed.lightning import check_lightning_version
from lightning_fed.lightning.package import OTHER, PACKAGE, PARTS, TRAINER
from lightning_fed.trainer.checks import check_optimizers, check_trainer

STEPS: Counter[int] = Counter()


class Counted(Net):
    """Counts its training steps; not in itself, where a visit forgets it."""

    make_optimizer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        STEPS[id(self)] = 0

    @property
    def steps(self) -> int:
        return STEPS[id(self)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        STEPS[id(self)] += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters()) if self.make_optimizer else super().configure_optimizers()


def counted(make_optimizer: Any) -> Counted:
    module = Counted()
    module.make_optimizer = make_optimizer
    return module


def refuse(trainer: pl.Trainer, error: type[BaseException], *words: str, module: Counted | None = None) -> None:
    module = module or Counted()
    with pytest.raises(error) as caught:
        trainer.fit(module, datamodule=classification())
    says(caught.value, *words)
    assert module.steps == 0


def says(error: BaseException, *words: str) -> None:
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


# -- Lightning, its Trainer and its strategies --------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.5.0", "2.6.2", "2.6.5", "2.7.0", "3.0"])
def test_another_lightning_is_refused(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_lightning_version(version)
    pip = PACKAGE.replace("_", "-")
    says(caught.value, f"found {version}", ">=2.6.6,<2.7", f'pip install "{pip}>=2.6.6,<2.7"')


@pytest.mark.parametrize("version", ["2.6.6", "2.6.7", pl.__version__])
def test_a_lightning_of_this_series_is_accepted(version: str) -> None:
    check_lightning_version(version)


def test_a_fit_checks_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported() -> None:
        check_lightning_version("2.7.0")

    monkeypatch.setattr("lightning_fed.trainer.checks.check_lightning_version", unsupported)
    refuse(quiet_trainer(FedADMM()), ImportError, "found 2.7.0")


def test_a_trainer_of_another_package_is_refused() -> None:
    class Trainer:
        """Stands in for the other package's Trainer, which is another class with the same name."""

        __module__ = PARTS[OTHER][0]

    with pytest.raises(TypeError) as caught:
        FederatedServer(FedADMM()).setup(Trainer(), Counted(), "fit")  # type: ignore[arg-type]
    says(caught.value, f"The Trainer is of {PARTS[OTHER][0]}", f"from {TRAINER} import Trainer")


def test_other_strategies_are_refused() -> None:
    class Elsewhere(SingleDeviceStrategy):
        """Like FSDP or DeepSpeed: Lightning's, but not one device with the whole model."""

    trainer = quiet_trainer(FedADMM(), strategy=Elsewhere(device=torch.device("cpu")))
    refuse(trainer, ValueError, "got strategy Elsewhere", 'devices=1, strategy="auto"')


@pytest.mark.parametrize("name", ["ddp", "ddp_spawn", "federated"])
def test_strategies_with_a_whole_model_in_every_process_are_accepted(name: str) -> None:
    check_trainer(quiet_trainer(FedADMM(), strategy=name, devices=2))  # not through fit, which would start processes


# -- callbacks ----------------------------------------------------------------------------------------------------


def test_two_servers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `FederatedServer`"):
        quiet_trainer(FedADMM(), callbacks=[FederatedServer(FedAvg())])


def test_a_server_and_a_subclass_of_it_are_refused() -> None:
    class Mine(FederatedServer):
        pass

    trainer = quiet_trainer(FedADMM(), callbacks=[Mine(FedAvg())])
    refuse(trainer, ValueError, "more than one FederatedServer", "keep one")
    trainer = quiet_trainer(Mine(FedADMM()), callbacks=[FederatedServer(FedAvg())])
    refuse(trainer, ValueError, "more than one FederatedServer", "keep one")


@pytest.mark.parametrize(
    "callback",
    [LearningRateFinder(), BatchSizeFinder(), StochasticWeightAveraging(swa_lrs=0.1)],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_drive_lightnings_epochs_are_refused(callback: pl.Callback) -> None:
    trainer = quiet_trainer(FedADMM(), rounds=3, callbacks=[callback])
    refuse(trainer, ValueError, type(callback).__name__, "does not fit rounds", "Remove it")


def test_the_tuner_is_refused() -> None:
    module, data = Counted(), classification()
    with pytest.raises(ValueError, match=r"LearningRateFinder .* does not fit rounds"):
        Tuner(quiet_trainer(FedADMM())).lr_find(module, datamodule=data)
    with pytest.raises(ValueError, match=r"BatchSizeFinder .* does not fit rounds"):
        Tuner(quiet_trainer(FedADMM())).scale_batch_size(module, datamodule=data)
    assert module.steps == 0


def test_a_validation_interval_that_no_round_reaches_is_refused() -> None:
    trainer = quiet_trainer(FedADMM(), val_check_interval=3)
    refuse(trainer, ValueError, "val_check_interval=3", "check_val_every_n_epoch=3", "check_val_every_n_epoch=None")


@pytest.mark.parametrize(
    ("settings", "validations"),
    [
        ({}, 6),
        ({"val_check_interval": 1}, 6),
        ({"val_check_interval": 0.25}, 6),
        ({"check_val_every_n_epoch": 3}, 2),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 2),
    ],
    ids=str,
)
def test_validation_intervals_that_fit_are_kept(settings: dict[str, Any], validations: int) -> None:
    class Validated(pl.Callback):
        count = 0

        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.count += 1

    validated = Validated()
    trainer = quiet_trainer(FedADMM(), rounds=6, callbacks=[validated], num_sanity_val_steps=0, **settings)
    trainer.fit(Counted(), datamodule=classification())
    assert validated.count == validations


# -- optimisers ---------------------------------------------------------------------------------------------------


def test_a_line_search_is_refused() -> None:
    def searching(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, line_search_fn="strong_wolfe")

    refuse(quiet_trainer(FedADMM()), ValueError, "LBFGS", "penalty", "line_search_fn=None", module=counted(searching))


class Scaler:
    """Stands in for a GradScaler, which wants a GPU."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimiser_with_a_grad_scaler_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = quiet_trainer(FedADMM()), counted(lambda params: kind(params, lr=0.01, fused=True))
    monkeypatch.setattr(trainer.precision_plugin, "scaler", Scaler(), raising=False)
    refuse(trainer, ValueError, f"{kind.__name__}(fused=True)", "GradScaler", "fused=False", module=module)


def test_one_of_the_two_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer(FedADMM())
    trainer.strategy._optimizers = [torch.optim.Adam(Counted().parameters(), fused=True)]
    check_optimizers(trainer, FedADMM())
    monkeypatch.setattr(trainer.precision_plugin, "scaler", Scaler(), raising=False)
    trainer.strategy._optimizers = [torch.optim.Adam(Counted().parameters(), fused=False)]
    check_optimizers(trainer, FedADMM())


@pytest.mark.parametrize("algorithm", [FedADMM(eta=4), FedDR(eta_hat=0.25), FedProx(mu=4)], ids=repr)
def test_a_step_too_long_for_the_penalty_is_warned_of(algorithm: Any) -> None:
    module = counted(lambda params: torch.optim.SGD(params, lr=0.5))
    with pytest.warns(UserWarning, match=r"lr \* penalty = 0\.5 \* 4 >= 2.*diverge.*below 0\.5"):
        quiet_trainer(algorithm, rounds=1).fit(module, datamodule=classification())
    assert module.steps


@pytest.mark.parametrize("algorithm", [FedADMM(eta=3.9), FedAvg()], ids=repr)
def test_a_step_that_is_short_enough_is_not_warned_of(algorithm: Any) -> None:
    module = counted(lambda params: torch.optim.SGD(params, lr=0.5))
    quiet_trainer(algorithm, rounds=1).fit(module, datamodule=classification())

"""``eta="auto"`` and FedPrimalDual(a, b) in ``Trainer.fit``: numbers from the planned step sizes, kept on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Compressed, FedADMM, FedPrimalDual
from lightning_fed.lightning.package import TRAINER
from lightning_fed.transforms import TopK


class Halving(Net):
    """Halves its step size after every round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def fit(algorithm: Any, rounds: int, module: Any = None, **settings: Any) -> FederatedServer:
    ckpt_path, trainer = settings.pop("ckpt_path", None), settings.pop("trainer", {})
    settings = {"local_steps": 3, **settings}
    server = FederatedServer(algorithm, evaluate_every=0, clients_per_round=2, seed=1, **settings)
    data = classification(clients=3)
    quiet_trainer(server, rounds, **trainer).fit(module or Net(lr=0.1), datamodule=data, ckpt_path=ckpt_path)
    return server


def saving(folder: Path) -> dict[str, Any]:
    callbacks = [ModelCheckpoint(folder, save_last=True, enable_version_counter=False)]
    return {"callbacks": callbacks, "enable_checkpointing": True}


def x_bar(server: FederatedServer) -> torch.Tensor:
    return server.federation.server.x_bar


@pytest.mark.parametrize(("mean", "factor"), [("all", 1.0), ("seen", 1.0), ("active", 0.3)])
def test_auto_is_the_number_that_the_planned_step_sizes_give(mean: str, factor: float) -> None:
    auto, number = (fit(FedADMM(eta=eta, mean=mean), 3) for eta in ("auto", factor / (0.1 * 3)))
    assert torch.equal(x_bar(auto), x_bar(number))
    assert auto.federation.algorithm.eta == factor / (0.1 * 3)


def test_auto_is_averaged_over_all_clients_where_visits_differ() -> None:
    server = fit(FedADMM(eta="auto", weights="samples"), 1, local_steps=None, local_epochs=1)
    assert server.federation.algorithm.eta == pytest.approx(1 / (0.1 * 3))  # 3 batches of at most 4 of 9 to 11 samples


def test_auto_is_logged_as_the_number_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", TRAINER):
        fit(FedADMM(eta="auto"), 1, trainer={"logger": CSVLogger(tmp_path, "", "")})
    assert "FedADMM(eta='auto') is FedADMM(eta=3.333) here: the step sizes of a visit sum to 0.3." in caplog.text
    assert "eta: 3.3333" in (tmp_path / "hparams.yaml").read_text()


@pytest.mark.parametrize("algorithm", [FedADMM(eta="auto", mean="active"), FedPrimalDual()], ids=["FedADMM", "FedPD"])
def test_a_resumed_run_goes_on_with_the_same_number_whatever_the_schedule_did(algorithm: Any, tmp_path: Path) -> None:
    whole = fit(algorithm, 4, Halving())
    fit(algorithm, 2, Halving(), trainer=saving(tmp_path))
    resumed = fit(algorithm, 4, Halving(), ckpt_path=tmp_path / "last.ckpt", trainer=saving(tmp_path))
    assert torch.equal(x_bar(whole), x_bar(resumed))
    assert resumed.federation.lr_sum == 0.1 * 3


def test_another_mean_is_refused_on_resume(tmp_path: Path) -> None:
    fit(FedADMM(), 1, trainer=saving(tmp_path))
    with pytest.raises(ValueError, match=r"server keeps x_bar, x_tilde.*FedADMM keeps x_bar, z_bar.*'mean': 'all'"):
        fit(FedADMM(mean="active"), 2, ckpt_path=tmp_path / "last.ckpt", trainer=saving(tmp_path))


@pytest.mark.parametrize("algorithm", [FedADMM(eta="auto"), FedPrimalDual(), Compressed(FedPrimalDual(), TopK(5))])
def test_optimisers_without_a_known_sum_of_step_sizes_are_refused(algorithm: Any) -> None:
    class Adaptive(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"plain SGD.*got Adam.*step sizes, which is known for plain SGD"):
        fit(algorithm, 1, Adaptive())
    fit(FedPrimalDual(sigma=0.1, lam=1.0), 1, Adaptive())


def test_client_memory_of_the_active_mean_is_one_vector() -> None:
    server = fit(FedADMM(mean="active"), 2)
    (state, *_) = (server.federation.store[cid].state for cid in server.federation.client_ids)
    assert list(vars(state)) == ["z_i"]

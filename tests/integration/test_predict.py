"""``trainer.predict``: after a fit, from a checkpoint, with a datamodule and with loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.cli.main import main
from lightning_fed.lightning import pl

CONFIG = Path(__file__).parents[2] / "configs" / "synthetic_fedadmm.yaml"


def server() -> FederatedServer:
    return FederatedServer(FedADMM(eta=1.0), clients_per_round=3, local_steps=5)


@pytest.fixture
def fitted(tmp_path: Path) -> tuple[pl.Trainer, Net, Path]:
    trainer, module = quiet_trainer(server(), 2), Net()
    trainer.fit(module, datamodule=classification())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    return trainer, module, tmp_path / "model.ckpt"


def expected(module: Net, data: FederatedDataModule) -> Tensor:
    """Classes of the test data, client after client, without a Trainer."""
    with torch.no_grad():
        x = torch.cat([data.client_dataset(cid, "test")[:][0] for cid in data.split_ids("test")])
        return module.eval()(x).argmax(1)


def test_after_a_fit_the_datamodule_gives_the_test_data(fitted: tuple[pl.Trainer, Net, Path]) -> None:
    trainer, module, path = fitted
    data = classification()
    wanted = expected(module, data)
    assert len(wanted) == 16
    assert torch.equal(torch.cat(trainer.predict(datamodule=data, ckpt_path=path)), wanted)
    assert torch.equal(torch.cat(trainer.predict(module, datamodule=data)), wanted)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # Lightning misses the FederatedServer
@pytest.mark.parametrize("federated", [True, False], ids=["with a server", "plain Trainer"])
def test_a_checkpoint_predicts_in_a_new_trainer(fitted: tuple[pl.Trainer, Net, Path], federated: bool) -> None:
    _, module, path = fitted
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = quiet_trainer(server(), 2) if federated else pl.Trainer(enable_checkpointing=False, **quiet)
    data = classification()
    predicted = trainer.predict(Net(seed=7), datamodule=data, ckpt_path=path)
    assert torch.equal(torch.cat(predicted), expected(module, data))


def test_loaders_of_one_client_give_its_part(fitted: tuple[pl.Trainer, Net, Path]) -> None:
    trainer, module, _ = fitted
    data = classification()
    one = torch.cat(trainer.predict(module, dataloaders=data.client_eval_dataloader("c1", "test")))
    assert torch.equal(one, expected(module, data)[4:8])


def test_validation_data_stand_in_for_test_data_and_without_either_it_says_so() -> None:
    whole = classification()
    train = {cid: whole.client_dataset(cid) for cid in whole.client_ids}
    test = {cid: whole.client_dataset(cid, "test") for cid in whole.client_ids}
    assert len(FederatedDataModule(train, val=test, batch_size=4).predict_dataloader().dataset) == 16
    with pytest.raises(ValueError, match="has neither"):
        FederatedDataModule(train, batch_size=4).predict_dataloader()


@pytest.mark.filterwarnings("ignore")
def test_the_command_predicts_with_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--return_predictions=true"]
    cli = main(["predict", "--config", str(CONFIG), *options])
    assert cli is not None
    predicted = torch.cat(cli.trainer.predict_loop.predictions)
    assert len(predicted) == len(cli.datamodule.predict_dataloader().dataset)

"""Clients that leave or join a federation: between rounds, between fits, between runs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer, x_of
from helpers.reuse import assert_same
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.callbacks import Faults, FederatedCallback
from lightning_fed.evaluation.evaluate import EvaluationError


def server_of(**kwargs: Any) -> FederatedServer:
    settings = {"local_steps": 3, "seed": 4, "evaluate_every": 1, "figure": False, **kwargs}
    return FederatedServer(settings.pop("algorithm", FedADMM(eta=0.5)), **settings)


def saving() -> dict[str, Any]:
    keeps = ModelCheckpoint(dirpath="kept", save_top_k=-1, filename="{epoch}")
    return {"callbacks": [keeps], "enable_checkpointing": True}


def rest_of(data: FederatedDataModule, gone: str) -> FederatedDataModule:
    """The same data without those of a client."""
    splits = {split: {cid: d for cid, d in own.items() if cid != gone} for split, own in data.splits.items()}
    return FederatedDataModule(**splits, batch_size=data.batch_size)


def assert_mean_of_shares(server: FederatedServer) -> None:
    federation = server.federation
    mean = sum(federation.recall(cid).x_hat_i.double() for cid in federation.client_ids) / len(federation.client_ids)
    torch.testing.assert_close(federation.server.x_tilde, mean, rtol=0, atol=1e-6)


class Leaves(FederatedCallback):
    """Expels a client after a round."""

    def __init__(self, client: str, after: int) -> None:
        self.client, self.after = client, after

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        if report.round == self.after:
            trainer.fit_loop.server.expel(self.client)
        elif report.round > self.after:
            assert self.client not in report.cohort


def test_a_callback_expels_a_client_between_rounds() -> None:
    server, module = server_of(), Net()
    quiet_trainer(server, 4, callbacks=[Leaves("c1", after=1)]).fit(module, datamodule=classification())
    assert server.federation.client_ids == ["c0", "c2", "c3"]
    assert server.federation.expelled == ["c1"]
    assert_mean_of_shares(server)
    assert torch.equal(x_of(module), server.federation.server.x_bar)


@pytest.mark.parametrize("rest", [False, True], ids=["data as before", "data without it"])
def test_between_fits_a_client_is_expelled(rest: bool) -> None:
    server, module = server_of(), Net()
    trainer = quiet_trainer(server, 2)
    trainer.fit(module, datamodule=classification())
    server.expel("c3")
    assert torch.equal(x_of(module), server.federation.server.x_bar)
    assert_mean_of_shares(server)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=classification(3 if rest else 4))
    assert server.federation.client_ids == ["c0", "c1", "c2"]
    assert_mean_of_shares(server)


def test_between_fits_a_client_is_admitted() -> None:
    server, module = server_of(), Net()
    trainer = quiet_trainer(server, 2)
    trainer.fit(module, datamodule=classification(3))
    server.admit("c3")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=classification(4))
    assert server.federation.client_ids == ["c0", "c1", "c2", "c3"]
    assert server.federation.store["c3"].visits == 2
    assert_mean_of_shares(server)


def test_a_resumed_run_has_other_clients_if_it_is_told() -> None:
    """Expelling before the resume, without data of the client, is expelling at the end of the first run."""
    quiet_trainer(server_of(), 2, **saving()).fit(Net(), datamodule=classification(4))
    server, module = server_of(), Net()
    server.expel("c3")
    quiet_trainer(server, 4, **saving()).fit(
        module, datamodule=rest_of(classification(4), "c3"), ckpt_path="kept/epoch=1.ckpt"
    )
    assert server.federation.client_ids == ["c0", "c1", "c2"]
    assert_mean_of_shares(server)

    straight, expected = server_of(), Net()
    quiet_trainer(straight, 4, callbacks=[Leaves("c3", after=1)]).fit(expected, datamodule=classification(4))
    assert torch.equal(x_of(module), x_of(expected))

    joined, module = server_of(), Net()
    joined.admit("c4")
    quiet_trainer(joined, 4, **saving()).fit(module, datamodule=classification(5), ckpt_path="kept/epoch=1.ckpt")
    assert joined.federation.client_ids == ["c0", "c1", "c2", "c3", "c4"]
    assert_mean_of_shares(joined)


def test_a_resume_remembers_who_was_expelled() -> None:
    straight, expected = server_of(), Net()
    quiet_trainer(straight, 4, callbacks=[Leaves("c1", after=0)]).fit(expected, datamodule=classification())

    def callbacks() -> list[Any]:
        return [Leaves("c1", after=0), *saving()["callbacks"]]

    quiet_trainer(server_of(), 2, callbacks=callbacks(), enable_checkpointing=True).fit(
        Net(), datamodule=classification()
    )
    server, module = server_of(), Net()
    trainer = quiet_trainer(server, 4, callbacks=callbacks(), enable_checkpointing=True)
    trainer.fit(module, datamodule=classification(), ckpt_path="kept/epoch=1.ckpt")
    assert server.federation.expelled == ["c1"]
    assert_same(module.state_dict(), expected.state_dict())


def test_a_client_expelled_before_the_first_fit_takes_no_part() -> None:
    server = server_of()
    server.expel("c0")
    quiet_trainer(server, 2).fit(Net(), datamodule=classification())
    assert server.federation.client_ids == ["c1", "c2", "c3"]
    assert "c0" not in server.federation.store


def test_a_cohort_must_still_be_possible() -> None:
    server = server_of(clients_per_round=4)
    quiet_trainer(server, 1).fit(Net(), datamodule=classification())
    with pytest.raises(ValueError, match="4"):
        server.expel("c0")
    assert len(server.federation.client_ids) == 4


class InVisit(FederatedCallback):
    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        trainer.fit_loop.server.expel(visit.client)


def test_nobody_leaves_in_the_middle_of_a_round() -> None:
    with pytest.raises(ValueError, match="cannot leave or join in the middle of a round"):
        quiet_trainer(server_of(), 1, callbacks=[InVisit()]).fit(Net(), datamodule=classification())


@pytest.mark.parametrize(("algorithm", "told"), [(FedADMM(eta=0.5), 1), (FedAvg(), 0)], ids=["FedADMM", "FedAvg"])
def test_a_warning_says_when_a_client_should_be_expelled(algorithm: Any, told: int) -> None:
    server = server_of(algorithm=algorithm, on_client_error="skip")
    trainer = quiet_trainer(server, 5, callbacks=[Faults(rate={"c2": 1.0}), Faults(trace={0: ["c1"]})])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(Net(), datamodule=classification())
    texts = [str(each.message) for each in found if "FederatedServer.expel" in str(each.message)]
    assert len(texts) == told
    assert all("Client 'c2' failed in all of its 3 visits" in text for text in texts)


# -- evaluation --------------------------------------------------------------------------------------------------


class Unfit(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if int(batch[1].max()) == 99:
            raise ZeroDivisionError("no luck")
        super().validation_step(batch, batch_idx)


def test_an_error_in_evaluation_names_the_client_and_the_round_does_not_count() -> None:
    data = classification()
    data.setup("fit")
    data.client_dataset("c2", "test").tensors[1].fill_(99)
    server, module = server_of(), Unfit()
    trainer = quiet_trainer(server, 1, limit_val_batches=0)
    with pytest.raises(EvaluationError, match="validation_step on the test data of client 'c2': ZeroDivisionError"):
        (trainer := quiet_trainer(server := server_of(), 1, limit_val_batches=0)).fit(
            module := Unfit(), datamodule=data
        )
    assert server.rounds_done == trainer.global_step == len(server.federation.store) == 0
    assert torch.equal(x_of(module), x_of(Unfit()))
    data.client_dataset("c2", "test").tensors[1].fill_(1)
    trainer.fit(module, datamodule=data)
    straight = Unfit()
    quiet_trainer(server_of(), 1, limit_val_batches=0).fit(straight, datamodule=data)
    assert torch.equal(x_of(module), x_of(straight))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_shown_and_its_client_named(bad: float) -> None:
    data = classification()
    data.setup("fit")
    data.client_dataset("c2").tensors[0].fill_(bad)
    server = server_of(on_client_error="skip")
    trainer = quiet_trainer(server, 2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(Net(), datamodule=data)
    texts = [str(each.message) for each in found if "The loss of client" in str(each.message)]
    assert len(texts) == 1
    assert "client 'c2'" in texts[0]
    assert not math.isfinite(float(trainer.callback_metrics["federated/objective"]))

"""What W&B really recorded, read back from the offline run and compared with numbers computed here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from helpers.modules import Net, Witness, classification, measured, quiet_trainer
from helpers.wandb_reader import FOLDERS, OfflineRun, read_run, wandb_at
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor, nn

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.prox import L1, Prox, Zero

ROUNDS, CLIENTS, COHORT, STEPS, ETA = 3, 5, 2, 3, 2.0


class Noted(Net):
    """Notes the loss of every local step."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[float, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.training:
            self.noted.append((float(loss.detach()), len(batch[1])))
        return loss


@dataclass
class Tracked:
    """A fit, what was seen of it from outside, and what W&B recorded."""

    run: OfflineRun
    witness: Witness
    data: FederatedDataModule
    module: Noted
    c: float  # strength of the L1 norm
    stray: list[str]  # files and folders left in the working directory

    def mean(self, x: Tensor, split: str, what: int, weights: str) -> float:
        found = {cid: measured(Net(), x, self.data.client_dataset(cid, split)) for cid in self.data.client_ids}
        sizes = {cid: 1 if weights == "uniform" else len(self.data.client_dataset(cid, split)) for cid in found}
        return sum(sizes[cid] * values[what] for cid, values in found.items()) / sum(sizes.values())


@pytest.fixture(scope="module", params=[Zero(), L1(0.01)], ids=["no g", "L1"])
def tracked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    home, g = tmp_path_factory.mktemp("home"), request.param
    save_dir = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        wandb_at(patch, home)
        yield track(g, save_dir, home)


def track(g: Prox, save_dir: Path, home: Path) -> Tracked:
    logger = WandbLogger(project="test", name="fit", save_dir=str(save_dir), offline=True)
    server = FederatedServer(FedADMM(eta=ETA, g=g), clients_per_round=COHORT, local_steps=STEPS, seed=3)
    witness, module, data = Witness(), Noted(), classification(CLIENTS)
    evaluation = ClientEvaluation(gradient_mapping=True)
    trainer = quiet_trainer(server, ROUNDS, logger=logger, callbacks=[witness, evaluation])
    try:
        trainer.fit(module, datamodule=data)
    finally:
        wandb.finish()
    stray = [path.name for path in home.iterdir() if path.name.upper() not in FOLDERS]
    return Tracked(read_run(save_dir), witness, data, module, getattr(g, "c", 0.0), stray)


def by_round(values: list[float], tolerance: float = 1e-6) -> Any:
    return {k: pytest.approx(value, rel=tolerance, abs=1e-9) for k, value in enumerate(values)}


# -- scalars by round -------------------------------------------------------------------------------------------


def test_the_objective_is_the_mean_of_the_clients_losses_plus_g(tracked: Tracked) -> None:
    expected = [
        tracked.mean(x, "train", 0, "uniform") + tracked.c * float(x.abs().sum()) for x in tracked.witness.x_bar
    ]
    assert tracked.run.series("federated/objective") == by_round(expected)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("name", "what"), [("loss", 0), ("accuracy", 1)])
def test_loss_and_accuracy_are_sample_weighted(tracked: Tracked, split: str, name: str, what: int) -> None:
    expected = [tracked.mean(x, split, what, "samples") for x in tracked.witness.x_bar]
    assert tracked.run.series(f"federated/{split}_{name}") == by_round(expected)


def test_local_losses_are_those_met_in_local_steps(tracked: Tracked) -> None:
    noted = tracked.module.noted
    assert len(noted) == ROUNDS * COHORT * STEPS
    visits = [noted[i : i + STEPS] for i in range(0, len(noted), STEPS)]
    means = [sum(loss * n for loss, n in visit) / sum(n for _, n in visit) for visit in visits]
    rounds = [means[i : i + COHORT] for i in range(0, len(means), COHORT)]
    assert tracked.run.series("federated/local_loss") == by_round([sum(r) / COHORT for r in rounds])
    assert tracked.run.series("federated/local_loss_min") == by_round([min(r) for r in rounds])
    assert tracked.run.series("federated/local_loss_max") == by_round([max(r) for r in rounds])


def test_what_training_step_logs_is_the_sample_weighted_mean_of_the_round(tracked: Tracked) -> None:
    per_round = COHORT * STEPS
    rounds = [tracked.module.noted[k * per_round : (k + 1) * per_round] for k in range(ROUNDS)]
    expected = [sum(loss * n for loss, n in r) / sum(n for _, n in r) for r in rounds]
    assert tracked.run.series("train_loss") == by_round(expected)


def test_the_primal_residual_is_the_mean_distance_of_the_cohort(tracked: Tracked) -> None:
    expected = []
    for x_bar, x_i, cohort in zip(tracked.witness.x_bar, tracked.witness.x_i, tracked.witness.cohorts, strict=True):
        expected.append(sum(float((x_i[cid] - x_bar).norm()) for cid in cohort) / len(cohort))
    assert tracked.run.series("federated/primal_residual") == by_round(expected)


def test_the_dual_residual_is_the_penalty_times_the_servers_step(tracked: Tracked) -> None:
    path = [tracked.witness.x0, *tracked.witness.x_bar]
    expected = [ETA * float((new - old).norm()) for old, new in itertools.pairwise(path)]
    assert tracked.run.series("federated/dual_residual") == by_round(expected)


def test_the_gradient_mapping_is_that_of_autograd(tracked: Tracked) -> None:
    expected = []
    for x in tracked.witness.x_bar:
        module = Net()
        nn.utils.vector_to_parameters(x, module.parameters())
        datasets = [tracked.data.client_dataset(cid).tensors for cid in tracked.data.client_ids]
        f = sum(nn.functional.cross_entropy(module(inputs), labels) for inputs, labels in datasets) / CLIENTS
        gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(f, list(module.parameters()))])
        v = x - gradient / ETA
        shrunk = v.sign() * (v.abs() - tracked.c / ETA).clamp(min=0)
        expected.append(float((ETA * (x - shrunk)).norm()))
        if not tracked.c:
            assert expected[-1] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert tracked.run.series("federated/gradient_mapping") == by_round(expected, 1e-5)


def test_bytes_are_counted_exactly_and_add_up(tracked: Tracked) -> None:
    d = sum(p.numel() for p in Net().parameters())
    expected = {k: (k + 1) * COHORT * d * 4 for k in range(ROUNDS)}
    assert tracked.run.series("federated/bytes_down") == expected
    assert tracked.run.series("federated/bytes_up") == expected


def test_cohort_and_time_of_every_round_are_logged(tracked: Tracked) -> None:
    assert tracked.run.series("federated/clients") == dict.fromkeys(range(ROUNDS), COHORT)
    seconds = tracked.run.series("federated/seconds")
    assert list(seconds) == list(range(ROUNDS))
    assert all(0 < value < 60 for value in seconds.values())


def test_the_step_of_everything_is_the_round(tracked: Tracked) -> None:
    assert {row["trainer/global_step"] for row in tracked.run.history} == set(range(ROUNDS))
    assert all(row["epoch"] == row["trainer/global_step"] for row in tracked.run.history if "epoch" in row)
    assert list(tracked.run.series("val_loss")) == list(range(ROUNDS))
    assert tracked.run.summary["federated/objective"]["last"] == tracked.run.series("federated/objective")[ROUNDS - 1]


# -- by client, settings, figure --------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_client(tracked: Tracked) -> None:
    ((step, reference),) = tracked.run.series("clients/table").items()
    columns, rows = tracked.run.table(reference)
    assert step == ROUNDS - 1
    assert columns == ["client", "samples", "visits"] + [
        f"{model}_{what}" for model in ("train", "test", "own") for what in ("loss", "accuracy")
    ] + ["bytes_down", "bytes_up", "local_steps"]
    assert [row[0] for row in rows] == tracked.data.client_ids
    assert [row[1] for row in rows] == [len(tracked.data.client_dataset(cid)) for cid in tracked.data.client_ids]
    counts = [sum(cid in cohort for cohort in tracked.witness.cohorts) for cid in tracked.data.client_ids]
    assert [row[2] for row in rows] == counts
    assert sum(counts) == ROUNDS * COHORT


def test_the_table_measures_the_servers_model_and_each_clients_own(tracked: Tracked) -> None:
    (reference,) = tracked.run.series("clients/table").values()
    _, rows = tracked.run.table(reference)
    x_bar, x_i = tracked.witness.x_bar[-1], tracked.witness.x_i[-1]
    assert 0 < len(x_i) < CLIENTS, "the test wants clients that were never asked"
    for cid, row in zip(tracked.data.client_ids, rows, strict=True):
        train, test = (tracked.data.client_dataset(cid, split) for split in ("train", "test"))
        assert row[3:5] == pytest.approx(measured(Net(), x_bar, train), rel=1e-6)
        assert row[5:7] == pytest.approx(measured(Net(), x_bar, test), rel=1e-6)
        if cid in x_i:
            assert row[7:9] == pytest.approx(measured(Net(), x_i[cid], test), rel=1e-6)


def test_the_table_is_blank_where_a_client_was_never_asked(tracked: Tracked) -> None:
    (reference,) = tracked.run.series("clients/table").values()
    _, rows = tracked.run.table(reference)
    unseen = [row[7:9] for row in rows if row[2] == 0]
    assert unseen
    assert unseen == [[None, None]] * len(unseen), "NaN is not JSON; a blank cell is null"


@pytest.mark.parametrize("column", ["visits", "train_loss", "train_accuracy", "test_loss", "own_loss", "own_accuracy"])
def test_histograms_hold_every_client_that_has_a_value(tracked: Tracked, column: str) -> None:
    ((step, histogram),) = tracked.run.series(f"clients/{column}").items()
    (reference,) = tracked.run.series("clients/table").values()
    columns, rows = tracked.run.table(reference)
    values = [v for row in rows if (v := row[columns.index(column)]) is not None and v == v]
    assert step == ROUNDS - 1
    assert histogram["_type"] == "histogram"
    assert sum(histogram["values"]) == len(values)
    if min(values) < max(values):
        assert histogram["bins"][0] == pytest.approx(min(values))
        assert histogram["bins"][-1] == pytest.approx(max(values))


def test_the_settings_of_the_federation_are_in_the_config(tracked: Tracked) -> None:
    g = {"name": "L1", "c": tracked.c, "on": None} if tracked.c else {"name": "Zero"}
    algorithm = {"name": "FedADMM", "eta": ETA, "alpha": 1.0, "g": g, "weights": "uniform", "start": "server"}
    settings = tracked.run.config["federated"]
    assert settings["algorithm"] == {**algorithm, "project_initial": False, "mean": "all"}
    assert settings["sampler"] == {"name": "Uniform", "size": COHORT}
    assert settings["clients"] == CLIENTS
    assert (settings["local_steps"], settings["local_epochs"]) == (STEPS, None)
    assert (settings["seed"], settings["buffers"]) == (3, "average")


def test_the_final_figure_is_an_image_of_the_run(tracked: Tracked) -> None:
    ((step, image),) = tracked.run.series("federated/figure").items()
    assert step == ROUNDS - 1
    assert image["_type"] == "image-file"
    assert image["path"] in tracked.run.files
    path = tracked.run.folder / "files" / image["path"]
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size == image["size"] > 5000


def test_a_fit_leaves_nothing_in_the_working_directory(tracked: Tracked) -> None:
    assert tracked.stray == []

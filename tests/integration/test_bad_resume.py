"""A checkpoint of another run is refused before the first local step."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer, x_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.core import FailurePolicy
from lightning_fed.prox import L1

# Lightning's advice about callbacks that made a checkpoint; some of ours are added by the fit itself
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


STEPS: Counter[int] = Counter()  # by module; what a module counts in itself, a visit forgets


class Counted(Net):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        STEPS[id(self)] = 0

    @property
    def steps(self) -> int:
        return STEPS[id(self)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        STEPS[id(self)] += 1
        return super().training_step(batch, batch_idx)


def server(algorithm: Algorithm | None = None, seed: int = 0, **kwargs: Any) -> FederatedServer:
    return FederatedServer(algorithm or FedADMM(), seed=seed, **{"local_steps": 2, "evaluate_every": 0, **kwargs})


def saved(data: FederatedDataModule | None = None, algorithm: Algorithm | None = None, **kwargs: Any) -> str:
    """A checkpoint after two rounds."""
    trainer = quiet_trainer(server(algorithm), 2, **kwargs)
    trainer.fit(Counted(), datamodule=data or classification())
    trainer.save_checkpoint("two_rounds.ckpt")
    return "two_rounds.ckpt"


def refuse(
    path: str,
    error: type[Exception],
    *words: str,
    given: FederatedServer | None = None,
    data: FederatedDataModule | None = None,
    module: Counted | None = None,
) -> None:
    module, given = module or Counted(), given or server()
    with pytest.raises(error) as caught:
        quiet_trainer(given, 4).fit(module, datamodule=data or classification(), ckpt_path=path)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert module.steps == 0


def test_the_same_run_is_not_refused() -> None:
    module = Counted()
    quiet_trainer(server(), 4).fit(module, datamodule=classification(), ckpt_path=saved())
    assert module.steps == 2 * 4 * 2


@pytest.mark.parametrize("kind", [FedAvg, FedDR])
def test_another_algorithm_is_refused(kind: Callable[[], Algorithm]) -> None:
    refuse(
        saved(),
        ValueError,
        "made by FedADMM",
        f"uses {kind().__class__.__name__}",
        "Resume with FedADMM",
        given=server(kind()),
    )


def test_another_number_of_clients_is_refused() -> None:
    words = ["with 4 clients", "this federation has 5", "'c4' is in only one", "Resume with the same clients"]
    refuse(saved(), ValueError, *words, data=classification(5))
    refuse(saved(), ValueError, "with 4 clients", "this federation has 3", "'c3'", data=classification(3))


def renamed(data: FederatedDataModule, names: dict[str, str]) -> FederatedDataModule:
    splits = {s: {names.get(cid, cid): d for cid, d in members.items()} for s, members in data.splits.items()}
    return FederatedDataModule(**splits, batch_size=data.batch_size)


def test_other_client_ids_are_refused() -> None:
    words = ["with 4 clients", "this federation has 4", "'c2' is in only one of them"]
    refuse(saved(), ValueError, *words, data=renamed(classification(), {"c2": "d2"}))


class Cohorts(FederatedCallback):
    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self.seen.append(sorted(cohort))


def test_the_same_clients_in_another_order_are_the_same_run_or_refused() -> None:
    """Cohorts are drawn by position: a datamodule that lists its clients in another order must not draw others."""
    data = classification()
    splits = {split: dict(reversed(members.items())) for split, members in data.splits.items()}
    other = FederatedDataModule(**splits, batch_size=data.batch_size)
    sampled = {"clients_per_round": 1, "local_steps": 1}
    whole, resumed = Cohorts(), Cohorts()
    trainer = quiet_trainer(server(**sampled), 2)
    trainer.fit(Counted(), datamodule=data)
    trainer.save_checkpoint("ordered.ckpt")
    quiet_trainer(server(**sampled), 8, callbacks=[whole]).fit(Counted(), datamodule=data)
    trainer = quiet_trainer(server(**sampled), 8, callbacks=[resumed])
    with contextlib.suppress(ValueError):
        trainer.fit(Counted(), datamodule=other, ckpt_path="ordered.ckpt")
    assert resumed.seen in ([], whole.seen[2:])


class Wider(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)


class Lenient(Wider):
    """Loads whatever fits, so that nobody but us can tell."""

    @property
    def strict_loading(self) -> bool:
        return False

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({}, strict=False)


def test_another_model_is_refused() -> None:
    refuse(saved(), RuntimeError, "state_dict for Wider", "net.0.weight", module=Wider())


def test_another_model_that_loads_leniently_is_refused() -> None:
    words = ["another model", "net.0.weight (8, 6)", "this module's are net.weight (3, 6)"]
    refuse(saved(), ValueError, *words, module=Lenient())


def test_another_seed_is_refused() -> None:
    refuse(saved(), ValueError, "seed 0", "this run has seed 3", "FederatedServer(seed=0)", given=server(seed=3))


def test_the_checkpoint_of_a_plain_trainer_is_refused() -> None:
    trainer = quiet_trainer(None, 1)
    trainer.fit(Counted(), datamodule=classification())
    trainer.save_checkpoint("plain.ckpt")
    refuse("plain.ckpt", ValueError, "not made by a federated fit", "without ckpt_path")


def test_a_weights_only_checkpoint_is_refused() -> None:
    trainer = quiet_trainer(server(), 2)
    trainer.fit(Counted(), datamodule=classification())
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    refuse("weights.ckpt", ValueError, "weights only", "save_weights_only=False")


def test_bare_weights_are_refused() -> None:
    """A file with a state_dict and nothing else, such as a published model."""
    version = pl.__version__
    torch.save({"state_dict": Counted().state_dict(), "pytorch-lightning_version": version}, "bare.ckpt")
    refuse("bare.ckpt", (KeyError, ValueError), "only the model")  # type: ignore[arg-type]


def test_another_hyper_parameter_is_warned_of() -> None:
    path = saved()
    with pytest.warns(UserWarning, match=r"other settings: eta=2.0 \(was 1.0\).*not the one"):
        quiet_trainer(server(FedADMM(eta=2.0)), 3).fit(Counted(), datamodule=classification(), ckpt_path=path)
    with pytest.warns(UserWarning, match=r"other settings: g=.*L1.*was.*Zero"):
        quiet_trainer(server(FedADMM(g=L1(0.1))), 3).fit(Counted(), datamodule=classification(), ckpt_path=path)


def test_a_checkpoint_from_before_the_default_start_changed_is_warned_of() -> None:
    path = saved(algorithm=FedADMM(start="local"))
    with pytest.warns(UserWarning, match=r"other settings: start='server' \(was 'local'\).*not the one"):
        quiet_trainer(server(FedADMM()), 3).fit(Counted(), datamodule=classification(), ckpt_path=path)


def test_other_local_work_and_other_data_are_warned_of() -> None:
    path, other = saved(), FederatedServer(FedADMM(), local_steps=7, buffers="server", evaluate_every=0)
    with pytest.warns(UserWarning, match=r"local_steps=7 \(was 2\), buffers='server' \(was 'average'\)"):
        quiet_trainer(other, 3).fit(Counted(), datamodule=classification(), ckpt_path=path)
    smaller = {f"c{i}": TensorDataset(torch.randn(5, 6), torch.arange(5) % 3) for i in range(4)}
    with pytest.warns(UserWarning, match=r"samples by client=.*was"):
        quiet_trainer(server(FedADMM()), 3).fit(Counted(), datamodule=FederatedDataModule(smaller), ckpt_path=path)


def test_another_policy_for_failures_is_warned_of() -> None:
    path, given = saved(), server(on_client_error="skip")
    with pytest.warns(UserWarning, match=r"settings: on_client_error=.FailurePolicy\(action='skip'.*was.*'raise'"):
        quiet_trainer(given, 3).fit(Counted(), datamodule=classification(), ckpt_path=path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Resuming with other settings")
        given = server(on_client_error=FailurePolicy())  # the default in other words
        quiet_trainer(given, 3).fit(Counted(), datamodule=classification(), ckpt_path=path)


def test_a_refused_resume_does_not_spoil_the_server() -> None:
    """After the error one may start anew with the same callback, and gets the run of a fresh one."""
    path, given = saved(), server(FedAvg())
    refuse(path, ValueError, "made by FedADMM", given=given)
    quiet_trainer(given, 2).fit(second := Counted(), datamodule=classification())
    quiet_trainer(server(FedAvg()), 2).fit(fresh := Counted(), datamodule=classification())
    assert given.rounds_done == 2
    assert torch.equal(x_of(second), x_of(fresh))


def test_one_trainer_does_not_take_a_second_module() -> None:
    trainer = quiet_trainer(server(), 2)
    trainer.fit(Counted(), datamodule=classification())
    trainer.fit_loop.max_epochs, other = 4, Counted()
    with pytest.raises(ValueError, match=r"already run 2 rounds with another module.*new Trainer"):
        trainer.fit(other, datamodule=classification())
    assert other.steps == 0

"""Memories in RAM and on disk: the same bits, small checkpoints, nothing left behind."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.kills import differences, known
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import BaseFinetuning, ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Compressed, FedADMM, FedAvg, FedDR, FedDyn, FedLin, FedPD, Scaffold
from lightning_fed.store import DamagedCheckpointError, DamagedRecordError, DiskStore, LeaseError, durable
from lightning_fed.trainer import client_memory
from lightning_fed.transforms import TopK

STATEFUL = [
    FedADMM(eta=0.5),
    FedADMM(eta=0.5, mean="seen"),
    FedADMM(eta="auto", mean="active"),
    FedDR(eta_hat=2.0),
    FedDyn(alpha=0.5),
    Scaffold(),
    FedPD(),
    FedLin(),
    Compressed(FedADMM(eta=0.5), TopK(5)),
    FedAvg(),
]


class Wide(pl.LightningModule):
    """So large that a client's memory has a file of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 40_000), nn.BatchNorm1d(40_000), nn.Tanh(), nn.Linear(40_000, 3))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(
    store: str,
    root: Path,
    rounds: int = 4,
    module: Any = None,
    algorithm: Any = None,
    resume: Path | str | None = None,
    trainer: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[pl.Trainer, FederatedServer]:
    algorithm = algorithm or FedADMM(eta=0.5)
    cohort = None if algorithm.traits.everybody else 2
    how = {"clients_per_round": cohort, "local_steps": 2, "evaluate_every": 0, "figure": False, "seed": 1, **settings}
    server = FederatedServer(algorithm, store=store, **how)
    more = {"enable_checkpointing": True, "default_root_dir": root, **(trainer or {})}
    run = quiet_trainer(server, rounds, **more)
    run.fit(module or Net(), datamodule=classification(clients=4), ckpt_path=resume)
    return run, server


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert differences(one, other) == []


def checkpoint(trainer: pl.Trainer) -> Path:
    return Path(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]


@pytest.mark.parametrize("algorithm", STATEFUL, ids=lambda a: type(a).__name__)
def test_memories_on_disk_are_those_in_ram(algorithm: Any, tmp_path: Path) -> None:
    _, ram = fit("memory", tmp_path / "a", algorithm=algorithm)
    _, disk = fit("disk", tmp_path / "b", algorithm=algorithm)
    assert isinstance(disk.federation.store, DiskStore)  # type: ignore[union-attr]
    assert_equal(known(ram), known(disk))


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Net, {"engine": "vectorized"}),
        (Net, {"workers": 2}),
        (Wide, {}),
        (Wide, {"buffers": "local"}),
        (Wide, {"workers": 2}),
    ],
    ids=["stacked", "workers", "large", "large, own buffers", "large, workers"],
)
def test_every_engine_keeps_the_same_on_disk(module: Any, settings: Any, tmp_path: Path) -> None:
    _, ram = fit("memory", tmp_path / "a", module=module(), **settings)
    _, disk = fit("disk", tmp_path / "b", module=module(), **settings)
    assert_equal(known(ram), known(disk))


@pytest.mark.parametrize("before", ["memory", "disk"])
@pytest.mark.parametrize("after", ["memory", "disk"])
@pytest.mark.parametrize("module", [Net, Wide])
def test_a_run_goes_on_with_another_store(before: str, after: str, module: Any, tmp_path: Path) -> None:
    _, whole = fit("memory", tmp_path / "whole", module=module())
    first, _ = fit(before, tmp_path / "run", rounds=2, module=module())
    _, rest = fit(after, tmp_path / "run", module=module(), resume=checkpoint(first))
    assert_equal(known(whole), known(rest))


class Unfreeze(BaseFinetuning):
    """The first layer is trained in rounds 0 and 3 alone."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        for p in pl_module.net[0].parameters():  # type: ignore[index]
            p.requires_grad_(epoch in (0, 3))


def test_memories_follow_parameters_that_are_frozen_and_trained_again(tmp_path: Path) -> None:
    runs = []
    for store in ("memory", "disk"):
        more = {"callbacks": [Unfreeze()]}
        runs.append(known(fit(store, tmp_path / store, rounds=6, trainer=more, clients_per_round=1)[1]))
    assert_equal(*runs)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_names_records_of_its_own_and_is_read_without_us(tmp_path: Path) -> None:
    trainer, server = fit("disk", tmp_path, module=Wide())
    path = checkpoint(trainer)
    (folder,) = path.parent.glob("*.records-*")
    model = sum(p.numel() for p in Wide().parameters()) * 4
    assert path.stat().st_size < 6 * model  # the weights, the server's x_bar, x_tilde in float64 and x0: no client
    records = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert records < 2.1 * model * len(server.federation.store)  # type: ignore[union-attr,arg-type]
    loaded = torch.load(path, weights_only=True)
    assert loaded["client_records"]["folder"] == folder.name
    again = Wide()
    again.load_state_dict(loaded["state_dict"])
    assert torch.equal(again.net[0].weight, trainer.lightning_module.net[0].weight)  # type: ignore[union-attr,index]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_records_are_removed_with_their_checkpoint_and_not_with_a_link(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, save_top_k=2, monitor="step", mode="max", save_last="link")
    trainer, _ = fit("disk", tmp_path, rounds=5, trainer={"callbacks": [keep]})
    files = {path.name for path in tmp_path.glob("*.ckpt") if not path.is_symlink()}
    folders = {path.name.partition(".records-")[0] for path in tmp_path.glob("*.records-*")}
    assert len(files) == 2
    assert files == folders
    assert (tmp_path / "last.ckpt").is_symlink()
    _, rest = fit("disk", tmp_path, rounds=6, resume=tmp_path / "last.ckpt")
    _, whole = fit("memory", tmp_path / "whole", rounds=6)
    assert_equal(known(rest), known(whole))
    trainer.strategy.remove_checkpoint(tmp_path / "last.ckpt")
    assert len(list(tmp_path.glob("*.records-*"))) >= 2


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_checkpoints_may_be_moved(tmp_path: Path) -> None:
    trainer, _ = fit("disk", tmp_path / "old", rounds=2)
    shutil.move(str(checkpoint(trainer).parent), tmp_path / "new")
    _, rest = fit("disk", tmp_path / "run", resume=tmp_path / "new" / checkpoint(trainer).name)
    assert_equal(known(rest), known(fit("memory", tmp_path / "whole")[1]))


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_damaged_checkpoint_is_refused_by_name(store: str, tmp_path: Path) -> None:
    trainer, _ = fit(store, tmp_path, rounds=2)
    path = checkpoint(trainer)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedCheckpointError, match="checksum differs") as caught:
        fit(store, tmp_path, resume=path)
    assert str(path) in str(caught.value)


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    trainer, _ = fit("disk", tmp_path, rounds=2)
    (segment,) = checkpoint(trainer).parent.glob("*.records-*/records/*.segment")
    raw = bytearray(segment.read_bytes())
    raw[-3] ^= 1
    segment.write_bytes(raw)
    with pytest.raises(DamagedRecordError, match="checksum differs"):
        fit("memory", tmp_path, resume=checkpoint(trainer))


def test_a_damaged_last_checkpoint_falls_back_to_the_newest_good_one(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)
    fit("disk", tmp_path, rounds=3, trainer={"callbacks": [keep]})
    (tmp_path / "last.ckpt").write_bytes(b"")
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)
    with pytest.warns(UserWarning, match=r"last.ckpt is damaged: it is empty. The run goes on from .*epoch=2"):
        _, rest = fit("disk", tmp_path, rounds=4, resume="last", trainer={"callbacks": [keep]})
    assert_equal(known(rest), known(fit("memory", tmp_path / "whole")[1]))


def test_a_damaged_last_checkpoint_that_was_given_by_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning resolves the word to an absolute string: others are names."""
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)
    fit("memory", tmp_path, rounds=2, trainer={"callbacks": [keep]})
    (tmp_path / "last.ckpt").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for named in (tmp_path / "last.ckpt", "last.ckpt"):
        with pytest.raises(DamagedCheckpointError, match=r"last.ckpt is damaged: it is empty"):
            fit("memory", tmp_path, rounds=3, resume=named)
    found = keep._find_last_checkpoints(quiet_trainer())
    assert found == {str(tmp_path / "last.ckpt")}


def test_records_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, save_top_k=-1)
    fit("disk", tmp_path, rounds=2, trainer={"callbacks": [keep]})
    one, two = sorted(tmp_path.glob("*.records-*"))
    one.rename(tmp_path / "spare")
    two.rename(one)
    with pytest.raises(DamagedRecordError, match=r"not the one that .* was saved with"):
        fit("disk", tmp_path, resume=tmp_path / one.name.partition(".records-")[0])


def test_a_users_checkpoint_io_is_wrapped_and_an_asynchronous_one_refused(tmp_path: Path) -> None:
    class Mine(TorchCheckpointIO):
        saved = 0

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            Mine.saved += 1
            super().save_checkpoint(*args, **kwargs)

    trainer, _ = fit("disk", tmp_path / "a", rounds=2, trainer={"plugins": [Mine()]})
    assert Mine.saved == 2
    _, rest = fit("disk", tmp_path / "a", resume=checkpoint(trainer), trainer={"plugins": [Mine()]})
    assert_equal(known(rest), known(fit("memory", tmp_path / "b")[1]))
    with pytest.raises(ValueError, match="AsyncCheckpointIO writes a checkpoint while rounds go on"):
        fit("disk", tmp_path / "c", trainer={"plugins": [AsyncCheckpointIO()]})


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    trainer, _ = fit("memory", tmp_path, rounds=1)
    path = checkpoint(trainer)
    loaded = torch.load(path, weights_only=True)
    del loaded["callbacks"]["FederatedServer"]["federation"]["format"]
    torch.save(loaded, path)
    with pytest.raises(ValueError, match=r"made by lightning_fed 0\.1\.0"):
        fit("memory", tmp_path, resume=path)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = fit("disk", tmp_path, rounds=2)
    path = checkpoint(trainer)
    before = sorted(p.name for p in path.parent.iterdir() if p.name != "client_memory")

    def full(name: str) -> None:
        if name == "checkpoint: saved":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "point", full)
        with pytest.raises(OSError, match="No space left"):
            fit("disk", tmp_path, resume=path)
    assert sorted(p.name for p in path.parent.iterdir() if p.name != "client_memory") == before
    _, rest = fit("disk", tmp_path, resume=path)
    assert_equal(known(rest), known(fit("memory", tmp_path / "whole")[1]))


# -- the folder of a run -------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    trainer, server = fit("disk", tmp_path)
    folder = checkpoint(trainer).parent / "client_memory"
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    del trainer, server
    gc.collect()
    assert not folder.exists()


def test_a_store_may_be_collected_in_another_thread(tmp_path: Path) -> None:
    """Garbage is collected in whatever thread allocates, that of a store included."""
    trainer, server = fit("disk", tmp_path, rounds=1)
    folder = checkpoint(trainer).parent / "client_memory"
    gone = threading.Thread(target=gc.collect)
    gc.disable()
    try:
        del trainer, server
        gone.start()
        gone.join()
    finally:
        gc.enable()
    for thread in threading.enumerate():  # what closes the store
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(10)
    assert not folder.exists()


def test_two_fits_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    _, one = fit("disk", tmp_path)
    before = known(one)
    _, two = fit("disk", tmp_path)
    assert_equal(known(one), before)
    assert_equal(known(two), before)


HOLDER = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from lightning_fed.store import Lease
lease = Lease(Path({folder!r}))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_on_the_same_run_is_refused_and_a_dead_ones_place_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "client_memory"
    code = HOLDER.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        began = time.monotonic()
        with pytest.raises(LeaseError, match=f"in use by process {other.pid}"):
            fit("memory", tmp_path)
        assert time.monotonic() - began < 10
        other.kill()
    (folder / "0123").mkdir()
    (folder / "0123" / "garbage").write_bytes(b"of a process that was killed")
    fit("disk", tmp_path)
    assert not (folder / "0123").exists()


def test_auto_decides_by_the_clients_that_the_run_can_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(client_memory, "rank_zero_info", said.append)
    _, server = fit("auto", tmp_path / "a", rounds=1)
    assert not isinstance(server.federation.store, DiskStore)  # type: ignore[union-attr]
    assert said[0].startswith("Clients' memories are kept in RAM: up to 2 clients x ")
    monkeypatch.setattr(client_memory, "SMALL", 1000)
    _, server = fit("auto", tmp_path / "b", rounds=1)
    assert isinstance(server.federation.store, DiskStore)  # type: ignore[union-attr]
    assert said[1].startswith(f"Clients' memories are kept on disk, in {tmp_path / 'b'}")
    assert "up to 2 clients x " in said[1]


def test_a_run_that_does_not_fit_the_disk_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match="but its disk has only 1,000 left"):
        fit("disk", tmp_path)


def test_another_folder_may_be_given(tmp_path: Path) -> None:
    fit("disk", tmp_path / "run", store_dir=tmp_path / "scratch")
    assert os.listdir(tmp_path / "scratch")


def test_frozen_parameters_are_held_once(tmp_path: Path) -> None:
    class Tuned(Wide):
        def __init__(self) -> None:
            super().__init__()
            for p in self.net[0].parameters():
                p.requires_grad_(False)

    module = Tuned()
    trainer, server = fit("memory", tmp_path, module=module)
    frozen = module.net[0].weight.numel() * 4
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad) * 4
    visited = len(server.federation.store)  # type: ignore[union-attr,arg-type]
    assert checkpoint(trainer).stat().st_size < 1.1 * (frozen + (5 + 2 * visited) * trained)


def test_data_of_many_clients(tmp_path: Path) -> None:
    """Only clients that took part occupy space, and starting is quick."""
    x = torch.randn(8, 6)
    data = FederatedDataModule({i: TensorDataset(x, torch.zeros(8).long()) for i in range(3000)}, batch_size=4)
    server = FederatedServer(FedADMM(), 10, local_steps=1, evaluate_every=0, figure=False, store="disk")
    trainer = quiet_trainer(server, 3, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(Net(), datamodule=data)
    store = server.federation.store  # type: ignore[union-attr]
    assert 10 <= len(store) <= 30
    assert sum(summary.visits for _, summary in store.summaries()) == 30  # type: ignore[attr-defined]

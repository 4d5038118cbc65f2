"""`lightning-fed checkpoint inspect|verify|export`: reads checkpoints, changes none, runs no code in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.cli import main
from lightning_fed.prox import Box
from lightning_fed.store import durable, seal, write_sealed

STORES = ["memory", "disk"]
BESIDE = "client_memory"  # of a run that is still alive: the fixture's trainers


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By store, the folder with the checkpoint of two rounds, and last.ckpt, a link to it."""
    found = {}
    for store in STORES:
        folder = tmp_path_factory.mktemp(store)
        keep = pl.callbacks.ModelCheckpoint(folder, "two", save_last="link")
        algorithm = FedADMM(eta=0.5, g=Box(-torch.inf, 9.0))
        how: Any = {"local_steps": 2, "evaluate_every": 0, "figure": False, "seed": 3, "store": store}
        server = FederatedServer(algorithm, 2, **how)
        trainer = quiet_trainer(server, 2, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(Net(norm=True), datamodule=classification(5))
        found[store] = folder
    return found


@pytest.fixture(params=STORES)
def run(request: pytest.FixtureRequest, runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a run's folder."""
    return copied(runs[request.param], tmp_path)


@pytest.fixture
def disk(runs: dict[str, Path], tmp_path: Path) -> Path:
    return copied(runs["disk"], tmp_path)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "run", symlinks=True, ignore=shutil.ignore_patterns(BESIDE)))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def stopped(code: int, *args: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["checkpoint", *map(str, args)])
    assert stop.value.code == code


def refused(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    """The error of a command that cannot be carried out: one line, exit code 2."""
    stopped(2, *args)
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.splitlines()) == 1
    assert error.startswith("lightning-fed checkpoint")
    assert "Traceback" not in error
    return error


# -- inspect -------------------------------------------------------------------------------------------------------


def test_inspect_tells_what_a_checkpoint_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run)
    main(["checkpoint", "inspect", str(run / "two.ckpt")])
    lines = capsys.readouterr().out.splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines[1:])
    assert lines[0] == str(run / "two.ckpt")
    assert rows["algorithm"].startswith("FedADMM(eta=0.5, alpha=1.0, g=Box(lo=-inf, hi=9.0, on=None)")
    assert rows["settings"].startswith("sampler=Uniform(size=2), local_steps=2")
    assert (rows["round"], rows["seed"]) == ("2", "3")
    assert rows["clients"] in {f"5, of which {visited} visited" for visited in (2, 3, 4)}
    parameters = sum(p.numel() for p in Net(norm=True).parameters())
    assert rows["parameters"] == f"{parameters}, of which {parameters} trained"
    assert rows["file"] == f"{(run / 'two.ckpt').stat().st_size:,} bytes"
    assert f"lightning {pl.__version__}, federation 2" in rows["versions"]
    assert content(run) == before


def test_inspect_in_json(run: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "inspect", str(run / "last.ckpt"), "--json"])
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    loaded = torch.load(run / "two.ckpt", weights_only=True)
    saved = torch.load(runs["memory"] / "two.ckpt", weights_only=True)["callbacks"]["FederatedServer"]["federation"]
    assert facts["algorithm"]["g"] == {"name": "Box", "lo": "-inf", "hi": 9.0, "on": None}
    assert facts["clients"] == {"total": 5, "visited": len(saved["store"])}
    assert facts["settings"] == loaded["callbacks"]["FederatedServer"]["settings"]
    assert facts["bytes"]["file"] == (run / "two.ckpt").stat().st_size
    if "client_records" in loaded:
        assert facts["records"] == loaded["client_records"]["folder"]
        assert facts["bytes"]["records"] == sum(p.stat().st_size for p in run.glob("*.records-*/records/*"))
        assert facts["versions"]["records"] == 1
    else:
        assert facts["records"] is facts["versions"]["records"] is None
        vectors = [t for entry in saved["store"].values() for t in entry["state"].values()]
        assert facts["bytes"]["records"] == sum(t.nbytes for t in vectors)


def test_inspect_of_other_files_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run / "other.ckpt"
    assert "No such file" in refused(capsys, "inspect", other)
    assert "Is a directory" in refused(capsys, "inspect", run)
    other.write_text("not a checkpoint")
    assert "not a checkpoint of torch.save" in refused(capsys, "inspect", other)
    torch.save(torch.zeros(2), other)
    assert "one object of type Tensor" in refused(capsys, "inspect", other)
    loaded = torch.load(run / "two.ckpt", weights_only=True)
    torch.save({"state_dict": loaded["state_dict"]}, other)
    assert "holds weights only" in refused(capsys, "inspect", other)
    torch.save({**loaded, "callbacks": {}}, other)
    assert "was not made by a federated fit" in refused(capsys, "inspect", other)
    del loaded["callbacks"]["FederatedServer"]["federation"]["format"]
    torch.save(loaded, other)
    assert "was made by lightning_fed 0.1.0" in refused(capsys, "inspect", other)
    flip(run / "two.ckpt", 2000)
    assert "two.ckpt is damaged: checksum differs" in refused(capsys, "inspect", run / "two.ckpt")


class Planted:
    """Makes a file when it is loaded from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("sealed", [True, False])
def test_planted_code_is_not_run(sealed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "bad.ckpt", tmp_path / "trace"
    torch.save({"state_dict": {}, "callbacks": Planted(trace)}, path)
    if sealed:
        seal(path)
    assert "could run code" in refused(capsys, "inspect", path)
    assert "could run code" in refused(capsys, "export", path, "--lightning", tmp_path / "out.ckpt")
    stopped(1, "verify", path)
    assert not trace.exists()
    assert not (tmp_path / "out.ckpt").exists()


# -- verify --------------------------------------------------------------------------------------------------------


def test_verify_of_good_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "verify", str(run), str(run / "two.ckpt")])
    assert capsys.readouterr().out.splitlines() == [f"{run / 'two.ckpt'}: good", "checkpoints: 1 good, 0 damaged"]
    main(["checkpoint", "verify", str(run / "last.ckpt")])
    assert capsys.readouterr().out.splitlines()[0] == f"{run / 'last.ckpt'}: good"


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, -1])
def test_verify_names_a_damaged_file_and_goes_on(run: Path, part: float, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "two.ckpt", bad := run / "bad.ckpt")
    flip(bad, int(part * bad.stat().st_size) if part > 0 else -1)
    stopped(1, "verify", run)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{bad}: damaged"
    assert lines[1].startswith(f"  {bad} is damaged: ")
    assert lines[2:] == [f"{run / 'two.ckpt'}: good", "checkpoints: 1 good, 1 damaged"]


def test_verify_names_a_damaged_record(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (segment,) = disk.glob("*.records-*/records/*.segment")
    flip(segment, -3)
    stopped(1, "verify", disk / "two.ckpt")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"  {segment} is damaged (client 'c")
    assert lines[1].endswith("checksum differs")


class Large(Net):
    """So large that a client's memory has a file of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 40_000), nn.Tanh(), nn.Linear(40_000, 3))


def test_verify_names_every_damaged_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = pl.callbacks.ModelCheckpoint(tmp_path, "one")
    server = FederatedServer(FedADMM(), local_steps=1, evaluate_every=0, figure=False, store="disk")
    quiet_trainer(server, 1, callbacks=[keep], enable_checkpointing=True).fit(Large(), datamodule=classification(3))
    files = sorted(tmp_path.glob("*.records-*/records/*.safetensors"))
    assert len(files) == 3
    main(["checkpoint", "verify", str(tmp_path)])
    capsys.readouterr()
    flip(files[0], files[0].stat().st_size // 4)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    stopped(1, "verify", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'one.ckpt'}: damaged"
    assert sorted(line.split()[0] for line in lines[1:-1]) == [str(path) for path in files[:2]]
    assert all("(client 'c" in line for line in lines[1:-1])


@pytest.mark.parametrize("name", ["manifest.json", "index.sqlite3", "records/*.segment", ""])
def test_verify_names_a_missing_part(disk: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = disk.glob("*.records-*")
    (missing,) = folder.glob(name) if name else [folder]
    shutil.rmtree(missing) if missing.is_dir() else missing.unlink()
    stopped(1, "verify", disk)
    assert str(missing) in capsys.readouterr().out.splitlines()[1]


def test_verify_tells_records_of_another_checkpoint_and_files_without_a_seal(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = torch.load(disk / "two.ckpt", weights_only=True)
    loaded["client_records"]["manifest"]["round"] = 7
    write_sealed(loaded, disk / "two.ckpt")
    stopped(1, "verify", disk)
    assert "it is not the one that two.ckpt was saved with" in capsys.readouterr().out
    torch.save({}, disk / "plain.ckpt")
    stopped(1, "verify", disk / "plain.ckpt")
    assert "it has no seal" in capsys.readouterr().out


def test_verify_of_a_broken_link_and_of_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, "verify", run, tmp_path / "nowhere.ckpt")
    (tmp_path / "empty").mkdir()
    assert "has no *.ckpt" in refused(capsys, "verify", tmp_path / "empty")
    (run / "two.ckpt").rename(run / "elsewhere")
    stopped(1, "verify", run)
    assert "No such file" in capsys.readouterr().out


# -- export --------------------------------------------------------------------------------------------------------

ALONE = """
import sys
sys.modules["lightning_fed"] = None
import torch
found = torch.load("model.pt", weights_only=True), torch.load("model.ckpt", weights_only=True)
assert found[0].keys() == found[1]["state_dict"].keys()
print(*sorted(found[1]))
"""


def test_export_writes_files_that_need_nothing_of_ours(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    out = {"--state-dict": tmp_path / "model.pt", "--lightning": tmp_path / "model.ckpt"}
    main(["checkpoint", "export", str(run / "last.ckpt"), *(str(word) for pair in out.items() for word in pair)])
    assert capsys.readouterr().out.splitlines() == [str(path) for path in out.values()]
    assert content(run) == before
    ran = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=True)
    kept = "epoch global_step hparams_name hyper_parameters pytorch-lightning_version state_dict"
    assert ran.stdout.split() == kept.split()
    expected = torch.load(run / "two.ckpt", weights_only=True)["state_dict"]
    module = Net(norm=True, seed=5)
    module.load_state_dict(exported := torch.load(out["--state-dict"], weights_only=True))
    assert exported._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    main(["checkpoint", "verify", *map(str, out.values())])


def test_lightning_reads_an_exported_checkpoint(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.ckpt"
    main(["checkpoint", "export", str(run / "two.ckpt"), "--lightning", str(out)])
    expected = torch.load(run / "two.ckpt", weights_only=True)["state_dict"]
    module = Net.load_from_checkpoint(out)
    assert module.hparams["norm"]
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    data = classification(5)
    data.setup("test")
    loader = DataLoader(ConcatDataset([data.client_dataset(cid, "test") for cid in data.client_ids]), batch_size=8)
    (found,) = quiet_trainer(None).test(other := Net(norm=True, seed=5), loader, ckpt_path=out)
    (wanted,) = quiet_trainer(None).test(module, loader)
    assert found == wanted
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_export_overwrites_only_by_force(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = run / "two.ckpt", tmp_path / "model.pt"
    out.write_text("precious")
    assert "exists. Use --force" in refused(capsys, "export", source, "--state-dict", out)
    assert out.read_text() == "precious"
    main(["checkpoint", "export", str(source), "--state-dict", str(out), "--force"])
    assert torch.load(out, weights_only=True).keys() == Net(norm=True).state_dict().keys()
    capsys.readouterr()
    for same in (source, run / "last.ckpt", Path(os.path.relpath(source))):
        assert "different files" in refused(capsys, "export", source, "--lightning", same, "--force")
    assert "different files" in refused(
        capsys, "export", source, "--lightning", "new.ckpt", "--state-dict", "new.ckpt", "--force"
    )


def test_export_that_fails_leaves_what_was_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "out").mkdir()
    (out := folder / "model.pt").write_text("precious")

    def full(name: str) -> None:
        if name == "checkpoint: saved":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "point", full)
    error = refused(capsys, "export", run / "two.ckpt", "--state-dict", out, "--force")
    assert f"Cannot write {out}" in error
    assert "No space left on device" in error
    assert content(folder) == {"model.pt": b"precious"}


def test_export_refuses_what_it_cannot_do(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Give --state-dict OUT" in refused(capsys, "export", run / "two.ckpt")
    assert "is a folder" in refused(capsys, "export", run / "two.ckpt", "--lightning", tmp_path, "--force")
    torch.save({"epoch": 1}, tmp_path / "plain.ckpt")
    assert "holds no model" in refused(capsys, "export", tmp_path / "plain.ckpt", "--lightning", "new.ckpt")
    (tmp_path / "file").touch()
    assert "File exists" in refused(capsys, "export", run / "two.ckpt", "--lightning", tmp_path / "file" / "new")
    assert not (tmp_path / "new.ckpt").exists()


# -- options and help ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["look"], ["inspect"], ["verify"], ["inspect", "a", "--jso"], ["export"]])
def test_a_wrong_option_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ("inspect", "verify", "export", "examples:", "Exit code: 1 if `verify` finds damage")),
        (["inspect"], ("FILE", "--json", "Print algorithm")),
        (["verify"], ("folder: all *.ckpt in it",)),
        (["export"], ("--state-dict OUT", "--lightning OUT", "--force")),
    ],
)
def test_help(words: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    stopped(0, *words, "--help")
    out = capsys.readouterr().out
    assert all(word in out for word in said)
    assert len(out.splitlines()) < 30

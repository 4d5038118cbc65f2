"""Checkpoint files are whole or absent, and anyone can read them."""

import errno
import os
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_fed.store import DamagedCheckpointError, WriteError, durable, read_sealed, seal, verify, write_sealed

PAYLOAD = {"state_dict": {"w": torch.randn(1000)}, "epoch": 3, "text": "a", "list": [1, 2.0, None]}


def same(a, b):
    return torch.equal(a["state_dict"]["w"], b["state_dict"]["w"]) and all(
        a[n] == b[n] for n in ("epoch", "text", "list")
    )


def test_torch_and_zip_tools_read_a_sealed_file(tmp_path):
    path = tmp_path / "last.ckpt"
    write_sealed(PAYLOAD, path)
    verify(path)
    assert same(read_sealed(path), PAYLOAD)
    assert same(torch.load(path, weights_only=True), PAYLOAD)
    assert same(torch.load(path, weights_only=False), PAYLOAD)
    assert same(torch.load(path, weights_only=True, mmap=True), PAYLOAD)
    with path.open("rb") as file:
        assert same(torch.load(file, weights_only=True), PAYLOAD)
    assert zipfile.ZipFile(path).testzip() is None
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_that_another_program_saved_can_be_sealed(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save(PAYLOAD, path)
    with pytest.raises(DamagedCheckpointError, match="has no seal"):
        verify(path)
    seal(path)
    verify(path)
    with pytest.raises(DamagedCheckpointError, match="not a ZIP archive without a comment"):
        seal(path)


def test_what_is_wrong_is_said(tmp_path):
    path = tmp_path / "a.ckpt"
    for data, what in [(b"", "it is empty"), (b"text", "not a checkpoint of torch.save")]:
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=what):
            verify(path)
    write_sealed(PAYLOAD, path)
    data = path.read_bytes()
    path.write_bytes(data[:-500])
    with pytest.raises(DamagedCheckpointError, match="truncated"):
        verify(path)
    path.write_bytes(data.replace(b"checkpoint 0001", b"checkpoint 0002"))
    with pytest.raises(DamagedCheckpointError, match="format version 2, this program reads 1"):
        verify(path)
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        verify(tmp_path / "nowhere.ckpt")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_in_a_sealed_file_is_not_executed(tmp_path):
    write_sealed({"evil": Evil()}, tmp_path / "a.ckpt")
    with pytest.raises(Exception, match="Weights only load failed"):
        read_sealed(tmp_path / "a.ckpt")
    assert not os.path.exists("executed")


@pytest.mark.parametrize("room", [0, 1, 100, 3000, 100_000, 400_000, 820_000])
def test_a_full_disk_leaves_the_previous_file(tmp_path, monkeypatch, room):
    path = tmp_path / "last.ckpt"
    write_sealed({"x": torch.ones(3)}, path)
    _fill_after(monkeypatch, room)
    payload = {str(i): torch.randn(20_000) for i in range(10)}
    with pytest.raises(WriteError, match=rf"Cannot write {path} \(800,000 bytes\): No space left"):
        write_sealed(payload, path)
    assert read_sealed(path)["x"].tolist() == [1.0] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def _fill_after(monkeypatch, room):
    """Let the disk be full after ``room`` bytes."""
    from lightning_fed.store import checkpoint_file

    real = checkpoint_file._Noting.write
    written = [0]

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            written[0] += len(memoryview(data).cast("B")) if not isinstance(data, bytes) else len(data)
            if written[0] > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def flush(self):
            self.file.flush()

    def write(self, data):
        if not isinstance(self.file, Full):
            self.file = Full(self.file)
        return real(self, data)

    monkeypatch.setattr(checkpoint_file._Noting, "write", write)
    monkeypatch.setattr(
        checkpoint_file, "seal", lambda path: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
    )


def test_a_failed_sync_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    write_sealed({"x": torch.ones(3)}, path)

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable, "_sync_file", broken)
    with pytest.raises(WriteError, match="Input/output error"):
        write_sealed(PAYLOAD, path)
    assert read_sealed(path)["x"].tolist() == [1.0] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WriteError, match="nowhere"):
        write_sealed({}, tmp_path / "nowhere" / "a.ckpt")


def test_the_temporary_folder_plays_no_part(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    write_sealed(PAYLOAD, tmp_path / "a.ckpt")
    assert same(read_sealed(tmp_path / "a.ckpt"), PAYLOAD)


def test_a_link_is_replaced_in_one_step_and_is_a_copy_where_there_are_none(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".last.part").symlink_to("gone")  # of a killed process
    durable.link_symbolically(tmp_path / "a", tmp_path / "last")
    durable.link_symbolically(tmp_path / "b", tmp_path / "last")
    assert (tmp_path / "last").readlink() == Path("b")

    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    durable.link_symbolically(tmp_path / "a", tmp_path / "last")
    assert not (tmp_path / "last").is_symlink()
    assert (tmp_path / "last").read_text() == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "last"]

"""A disk that refuses leaves the store, its snapshots and checkpoints as they were."""

import os
import resource

import pytest
import torch
from helpers.memories import content, files, fresh, large, memory

from lightning_fed.store import DiskStore, Lease, WriteError, durable, read_sealed, write_sealed


def limited(size, action):
    """Run an action in a child that may write no file longer than ``size``; the kernel refuses with EFBIG."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            action()
            status = 0
        except WriteError as error:
            status = 7 if "Cannot write" in str(error) and "bytes" in str(error) else 8
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("like", "size"),
    [(fresh, size) for size in (0, 100, 4000, 5000, 9000, 40_000, 200_000)]
    + [(large, size) for size in (0, 100, 5000, 300_000, 1_000_000)],
)
def test_a_commit_that_the_disk_refuses_changes_nothing(ram, like, size):
    with DiskStore(ram, like) as store:
        store.commit(0, {i: memory(i, like) for i in range(3)}, {"x_bar": torch.ones(3)})
        before, named = content(store), files(store)

    def commit():
        with DiskStore(ram, like) as store:
            store.stage(9, memory(9, like), 1)
            store.commit(1, {i: memory(i + 10, like) for i in range(300 if like is fresh else 3)} | {9: None})

    assert limited(size, commit) == 7
    with DiskStore(ram, like) as store:
        assert (content(store), files(store), store.rounds) == (before, named, [0])
        store.commit(1, {5: memory(5, like)})
        assert store[5].visits == 5


@pytest.mark.parametrize("size", [0, 100, 10_000, 700_000])
def test_a_checkpoint_that_the_disk_refuses_leaves_the_previous_one(ram, size):
    path = ram / "last.ckpt"
    write_sealed({"x": torch.ones(3)}, path)
    assert limited(size, lambda: write_sealed({str(i): torch.randn(20_000) for i in range(10)}, path)) == 7
    assert read_sealed(path)["x"].tolist() == [1.0] * 3
    assert [p.name for p in ram.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("size", [0, 100, 10_000])
def test_a_snapshot_that_the_disk_refuses_is_removed(ram, size):
    def snapshot():
        with DiskStore(ram / "store", fresh) as store:
            store.snapshot(ram / "saved")

    with DiskStore(ram / "store", fresh) as store:
        store.commit(0, {"a": memory(1)})
    assert limited(size, snapshot) == 7
    assert not (ram / "saved").exists()
    snapshot()


def test_a_folder_that_cannot_be_written_is_named():
    for action in (Lease, lambda folder: DiskStore(folder, fresh), lambda folder: write_sealed({}, f"{folder}/a.ckpt")):
        with pytest.raises(WriteError, match="Cannot write /proc/nowhere"):
            action("/proc/nowhere")


@pytest.mark.parametrize("number", [30, 13], ids=["read-only", "forbidden"])
def test_a_read_only_folder_is_named_and_left_as_it_was(ram, monkeypatch, number):
    with DiskStore(ram, large) as store:
        store.commit(0, {"a": memory(1, large)})
        before, named = content(store), files(store)
        real = os.replace

        def refuse(source, target):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(WriteError, match=rf"Cannot write {ram}/records.*bytes\): {os.strerror(number)}"):
            store.commit(1, {"a": memory(2, large)})
        assert (content(store), files(store)) == (before, named)
        monkeypatch.setattr(os, "replace", real)
    assert durable.temporary(ram / "a").name == ".a.part"

"""Damage to any byte of a snapshot or a checkpoint is detected, and told by file and part."""

import json
import os
import random
import shutil

import pytest
import torch
from helpers.memories import content, files, fresh, large, memory

from lightning_fed.store import (
    DamagedCheckpointError,
    DamagedRecordError,
    DiskStore,
    read_sealed,
    records,
    verify,
    verify_snapshot,
    write_sealed,
)
from lightning_fed.store.database import VersionError

CASES = 2000 if os.environ.get("LIGHTNING_FED_SOAK") else 150


@pytest.fixture
def saved(ram):
    """A snapshot with a large record, a segment and the server."""
    with DiskStore(ram / "store", large) as store:
        store.commit(1, {"big": memory(1, large), "small": memory(2), 7: memory(3)}, {"x_bar": torch.ones(9)})
        store.snapshot(ram / "saved")
    return ram / "saved"


def damages(data, count, seed=0):
    """Ways to damage a file: flipped bits (those of the header more often), cut off at every kind of place, empty."""
    draw = random.Random(seed)
    for step in range(count):
        place = draw.randrange(min(len(data), 2000) if step % 2 else len(data))
        if step % 5 == 4:
            yield data[:place]
        else:
            yield data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    yield b""
    yield data[:-1]
    yield bytes(len(data))
    yield data + b"x"


def overwrite(path, data):
    path.unlink()  # a name of its own: the store's is another link to the same file
    path.write_bytes(data)


@pytest.mark.parametrize("pattern", ["manifest.json", "index.sqlite3", "records/*.segment", "records/*.safetensors"])
def test_every_damage_to_a_snapshot_is_told_by_file(saved, pattern):
    (path,) = saved.glob(pattern)
    data = path.read_bytes()
    for damaged in damages(data, CASES):
        if damaged[: len(data)] == data and path.parent.name == "records":
            continue  # bytes behind the end of a record are nobody's
        overwrite(path, damaged)
        found = verify_snapshot(saved)
        assert found
        assert all(damage.path == path and str(path) in str(damage) for damage in found)
    overwrite(path, data)
    assert verify_snapshot(saved) == []


def test_a_damaged_client_is_named_and_the_others_are_read(saved, ram):
    (path,) = saved.glob("records/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-20_000] ^= 1
    overwrite(path, data)
    with DiskStore.restore(saved, ram / "again", fresh) as store:
        assert [store[cid].visits for cid in ("small", 7)] == [2, 3]
        with pytest.raises(DamagedRecordError, match=r"client 'big', round 1\): state/x_i: checksum differs"):
            store.get("big")
        store.prefetch(["big"])
        with pytest.raises(DamagedRecordError, match="client 'big'"):
            store.get("big")


def test_records_swapped_between_clients_and_rounds_are_detected(ram):
    with DiskStore(ram / "store", large, cache_bytes=0) as store:
        store.commit(1, {"a": memory(1, large), "b": memory(2, large)})
        (a, b) = (store.locate(cid).path for cid in "ab")
        old = a.read_bytes()
        a.rename(ram / "x"), b.rename(a), (ram / "x").rename(b)
        for cid, other in ("ab", "ba"):
            with pytest.raises(DamagedRecordError, match=f"client '{cid}', round 1.*of client '{other}', round 1"):
                store.get(cid)
        store.commit(2, {"a": memory(3, large)})
        store.locate("a").path.write_bytes(old)
        with pytest.raises(DamagedRecordError, match=r"client 'a', round 2.*of client 'a', round 1"):
            store.get("a")
        store.locate("a").path.unlink()
        with pytest.raises(DamagedRecordError, match=r"file: No such file"):
            store.get("a")


def test_files_of_another_version_are_refused_by_name(ram, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(records, "VERSION", 2)
        with DiskStore(ram / "store", large, cache_bytes=0) as store:
            store.commit(1, {"a": memory(1, large)})
            store.snapshot(ram / "saved")
    with DiskStore(ram / "store", large) as store:
        with pytest.raises(DamagedRecordError, match=r"safetensors.*format version 2, this program reads 1"):
            store.get("a")
        store._index.connection.execute("PRAGMA user_version = 9")
    with pytest.raises(VersionError, match=r"index.sqlite3 has format version 9"):
        DiskStore(ram / "store", large)
    path = ram / "saved" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    assert "manifest.json is damaged: version: format version 3" in str(verify_snapshot(ram / "saved")[0])


def test_a_file_that_is_no_database_is_refused_by_name(ram):
    DiskStore(ram, fresh).close()
    (ram / "index.sqlite3").write_bytes(b"x" * 5000)
    with pytest.raises(DamagedRecordError, match=r"index.sqlite3 is damaged"):
        DiskStore(ram, fresh)


CHANGES = [
    "UPDATE clients SET key = CAST('s:other' AS BLOB) WHERE number = 1",
    "UPDATE records SET visits = visits + 1 WHERE number = 1",
    "UPDATE records SET digest = zeroblob(32) WHERE number = 2",
    "UPDATE records SET died = 1 WHERE number = 2",
    "DELETE FROM records WHERE number = 1",
    "DELETE FROM clients WHERE number = 2",
    "UPDATE manifests SET sum = zeroblob(32)",
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_lost_or_changed_a_row_is_refused(ram, change):
    with DiskStore(ram, fresh) as store:
        store.commit(0, {"a": memory(1), "b": memory(2)})
        store._index.connection.execute(change)
    with pytest.raises(DamagedRecordError, match=r"index.sqlite3 is damaged: index: its records are not"):
        DiskStore(ram, fresh)


def test_records_whose_names_the_index_lost_are_not_removed(ram):
    with DiskStore(ram, large) as store:
        store.commit(0, {"a": memory(1, large), "b": memory(2, large)})
        named = files(store)
        store._index.connection.execute("UPDATE files SET name = 'a-0-b.safetensors' WHERE number = 1")
    with DiskStore(ram, large) as store:
        assert files(store) == named
        with pytest.raises(DamagedRecordError, match=r"client 'a', round 0\): file: No such file"):
            store.get("a")


def test_flipped_bits_in_a_live_index_do_no_harm(ram):
    with DiskStore(ram, fresh) as store:
        store.commit(0, {i: memory(i) for i in range(30)}, {"x_bar": torch.ones(3)})
        before = content(store)
    data = (ram / "index.sqlite3").read_bytes()
    refused = 0
    for damaged in damages(data, CASES):
        (ram / "index.sqlite3").write_bytes(damaged)
        shutil.copytree(ram / "records", ram / "records.kept", copy_function=os.link)
        try:
            with DiskStore(ram, fresh) as store:
                assert content(store) == before
        except (DamagedRecordError, VersionError):
            refused += 1
        shutil.rmtree(ram / "records")
        (ram / "records.kept").rename(ram / "records")
    assert refused > CASES / 10  # most bytes of a page are unused


def test_a_damaged_snapshot_is_not_restored(saved, ram):
    shutil.rmtree(saved / "records")
    with pytest.raises(DamagedRecordError, match="missing"):
        DiskStore.restore(saved, ram / "again", fresh)
    (saved / "manifest.json").unlink()
    with pytest.raises(DamagedRecordError, match="manifest"):
        DiskStore.restore(saved, ram / "again", fresh)


def test_a_segment_that_is_damaged_does_not_stop_commits(ram):
    with DiskStore(ram, fresh) as store:
        store.commit(0, {i: memory(i) for i in range(10)})
    (name,) = files(store)
    os.truncate(ram / "records" / name, 4000)
    with DiskStore(ram, fresh) as store:
        for step in range(1, 5):
            store.commit(step, {i: memory(i) for i in range(8)})
        with pytest.raises(DamagedRecordError, match="client 9, round 0"):
            store.get(9)
        assert store[3].visits == 3


def test_every_damage_to_a_checkpoint_is_detected(ram):
    path = ram / "last.ckpt"
    write_sealed({"x": torch.randn(300), "n": 3}, path)
    data = path.read_bytes()
    for damaged in damages(data, 2 * CASES):
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=r"last.ckpt is damaged"):
            verify(path)
    for place in range(len(data) - 140, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DamagedCheckpointError):
            read_sealed(path)
    path.write_bytes(data)
    verify(path)

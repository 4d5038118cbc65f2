"""A process that is killed at any durability point leaves the state before or after, bit for bit."""

import os
import shutil

import pytest
import torch
from helpers.marks import quick_first
from helpers.memories import content, files, fresh, killed_at, memory, plain

from lightning_fed.store import DiskStore, durable, read_sealed, verify_snapshot, write_sealed
from lightning_fed.store import files as store_files

SERVER = {"x_bar": torch.arange(3.0)}


def opened(folder, **options):
    return DiskStore(folder / "store", fresh, **options)


def whole(store):
    server = store.server()
    return content(store), store.round, None if server is None else server["x_bar"].tolist()


def commit(folder):
    with opened(folder) as store:
        store.commit(7, {cid: memory(30 + i) for i, cid in enumerate(["a", "b", "new"])}, SERVER)


def commit_staged(folder):
    with opened(folder) as store:
        for i, cid in enumerate(["a", "b", "new", "abandoned"]):
            store.stage(cid, memory(30 + i), 7)
        store.commit(7, {"a": None, "b": memory(31), "new": None}, SERVER)


def commit_twice(folder):
    commit(folder)
    commit(folder)


def roll_back(folder):
    with opened(folder) as store:
        store.roll_back()


def start_anew(folder):
    opened(folder, new=True).close()


def restore(folder):
    DiskStore.restore(folder / "saved", folder / "store", fresh).close()


ACTIONS = [commit, commit_staged, commit_twice, roll_back, start_anew, restore]
BRIEF = {"small": ACTIONS, "large": [commit_staged], "hollow": [commit]}
CASES = [
    pytest.param(kind, action, id=f"{kind}-{action.__name__}", marks=[] if kind == "small" else [pytest.mark.slow])
    for kind, brief in BRIEF.items()
    for action in (ACTIONS if os.environ.get("LIGHTNING_FED_SOAK") else brief)
]


@pytest.fixture
def base(request, ram, monkeypatch):
    """A store after seven commits, with a snapshot of an earlier one."""
    monkeypatch.setattr(store_files, "LARGE", 1 if request.param == "large" else 2**20)
    folder = ram / "base"
    for step in range(7):
        with opened(folder) as store:
            cids = ["a", "b", "c", "d"] if step == 0 or request.param != "hollow" else ["a", "b", "c"]
            store.commit(step, {cid: memory(10 * step + i) for i, cid in enumerate(cids)}, {"x_bar": torch.zeros(step)})
            if step == 3:
                store.snapshot(folder / "saved")
    return folder


def states_around(base, action, ram):
    """What a store holds before and after an action."""
    found = []
    for name in ("before", "after"):
        shutil.copytree(base, ram / name)
        if name == "after":
            action(ram / name)
        with opened(ram / name) as store:
            found.append(whole(store))
    return found


@pytest.mark.parametrize(("base", "action"), CASES, indirect=["base"])
def test_a_killed_store_is_as_before_or_after(base, ram, action):
    allowed = states_around(base, action, ram)
    if action is restore:
        allowed.append(({}, None, None))  # the old store is cleared before the snapshot is linked
    at, seen = 1, []
    while True:
        folder = ram / str(at)
        shutil.copytree(base, folder)
        killed = killed_at(at, lambda folder=folder: action(folder))
        check(folder, allowed, seen)
        shutil.rmtree(folder)
        if not killed:
            break
        at += 1
    assert seen[-1] == 1
    if action not in (restore, commit_staged):  # where two threads write, the count of points is not the same each time
        assert seen == sorted(seen)  # once it has moved on, it does not fall back


def check(folder, allowed, seen):
    with opened(folder) as store:
        found = whole(store)
        assert found in allowed
        seen.append(allowed.index(found))
        store.commit(8, {"z": memory(99)})
        store.commit(9, {"z": memory(98)})
        assert files(store) == sorted(store._index.files())
        assert plain(store["z"]) == plain(memory(98))
    assert verify_snapshot(folder / "saved") == []
    left = {path.name for path in (folder / "store").iterdir()}
    assert left == {"index.sqlite3", "lease", "records"}


@pytest.mark.parametrize("base", quick_first(["hollow", "large"]), indirect=True)
def test_a_killed_snapshot_is_complete_or_no_snapshot(base, ram):
    def snapshot(folder):
        with opened(folder) as store:
            store.snapshot(folder / "made")

    at = 1
    while True:
        folder = ram / str(at)
        shutil.copytree(base, folder)
        killed = killed_at(at, lambda folder=folder: snapshot(folder))
        if (folder / "made" / "manifest.json").exists():
            assert verify_snapshot(folder / "made") == []
        else:
            assert killed
            assert "manifest.json" in str(verify_snapshot(folder / "made")[0])
        shutil.rmtree(folder / "made", ignore_errors=True)
        snapshot(folder)
        with opened(folder) as store, DiskStore.restore(folder / "made", ram / "again", fresh) as again:
            assert whole(again) == whole(store)
        if not killed:
            break
        at += 1
    assert at > 5


@pytest.mark.parametrize("previous", [True, False])
def test_a_killed_save_leaves_the_previous_checkpoint_or_the_new_one(ram, previous):
    path, outcomes, at = ram / "folder" / "last.ckpt", [], 1
    path.parent.mkdir()
    while True:
        path.unlink(missing_ok=True)
        if previous:
            write_sealed({"x": torch.zeros(3)}, path)
        killed = killed_at(at, lambda: write_sealed({"x": torch.ones(3)}, path))
        outcomes.append(read_sealed(path)["x"].tolist()[0] if path.exists() else None)
        assert [p.name for p in path.parent.iterdir() if p.suffix == ".ckpt"] == ["last.ckpt"] * path.exists()
        if not killed:
            break
        at += 1
    assert at > 5
    assert set(outcomes) == {0.0 if previous else None, 1.0}
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]  # the next save overwrote what was left


@pytest.mark.parametrize("base", ["large"], indirect=True)
def test_every_durability_point_has_been_passed(base, ram, monkeypatch):
    seen = set()
    monkeypatch.setattr(durable, "point", seen.add)
    for action in (commit, commit_staged, roll_back, restore):
        shutil.copytree(base, ram / action.__name__)
        action(ram / action.__name__)
    assert {"index: before commit", "index: committed", "folder: synced", "link: made", "write: renamed"} <= seen

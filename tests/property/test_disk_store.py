"""A store on disk is a store in memory: whatever is committed, removed, reopened, rolled back or restored."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from helpers.memories import content, files, fresh, memory, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fed.store import DiskStore, commit, verify_snapshot
from lightning_fed.store import files as store_files

MANY = 300 if os.environ.get("LIGHTNING_FED_SOAK") else 25
COHORT = st.sets(st.integers(0, 11), max_size=5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), COHORT, COHORT),
        st.tuples(st.just("stage"), COHORT),
        st.tuples(st.sampled_from(["reopen", "roll back", "snapshot", "restore"])),
    ),
    max_size=25,
)


class Model:
    """What a store should hold, and its kept commits."""

    def __init__(self):
        self.history = [(None, {})]
        self.saved = None

    def commit(self, round, memories, removed):
        now = {cid: m for cid, m in self.history[-1][1].items() if cid not in removed} | memories
        self.history = [*self.history[-1:], (round, now)]


@pytest.mark.parametrize("large", [1, 2**20], ids=["large", "small"])
@settings(max_examples=MANY, deadline=None)
@given(steps=STEPS)
def test_any_sequence_of_operations(large, steps):
    base = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_files, "LARGE", large)
        patched.setattr(store_files, "SEGMENT", 6000)  # a few records: many segments
        patched.setattr(commit, "_LEAST_MOVED", 3000)
        model, store = Model(), DiskStore(base / "store", fresh, cache_bytes=200)
        try:
            for number, step in enumerate(steps):
                store = apply(model, store, step, number, base)
                agree(model, store)
        finally:
            store.close()
            shutil.rmtree(base)


def apply(model, store, step, number, base):
    match step:
        case "commit", cids, removed:
            memories = {cid: memory(100 * number + cid) for cid in cids}
            store.prefetch(cids | removed)
            store.commit(number, memories, removed=removed - cids)
            model.commit(number, {cid: plain(m) for cid, m in memories.items()}, removed - cids)
        case "stage", cids:
            for cid in cids:
                store.stage(cid, memory(7), number)
        case ("reopen",):
            store.close()
            return DiskStore(base / "store", fresh, cache_bytes=200)
        case ("roll back",) if len(store.rounds) == 2:
            store.roll_back()
            model.history.pop()
        case ("snapshot",):
            shutil.rmtree(base / "saved", ignore_errors=True)
            store.snapshot(base / "saved")
            model.saved = model.history[-1]
        case ("restore",) if model.saved is not None:
            store.close()
            model.history = [model.saved]
            return DiskStore.restore(base / "saved", base / "store", fresh, cache_bytes=200)
    return store


def agree(model, store):
    round, memories = model.history[-1]
    assert content(store) == memories
    assert len(store) == len(memories)
    assert store.round == round
    named = store._index.files()
    assert set(named) <= set(files(store))
    alive = dict(store._index.connection.execute("SELECT name, alive FROM files"))
    held = "SELECT name, sum(length) FROM records JOIN files ON files.number = file GROUP BY name"
    assert alive == dict(store._index.connection.execute(held))
    if model.saved is not None:
        assert verify_snapshot(store.folder.parent / "saved") == []

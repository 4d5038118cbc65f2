"""Client memories on disk are what was put, bit for bit."""

import errno
import os

import pytest
import torch
from helpers.memories import State, content, files, fresh, large, memory, plain

from lightning_fed.core.memory import Cost, Memory, MemoryStore
from lightning_fed.store import DiskStore, LeaseError, WriteError, durable, read, verify_snapshot


@pytest.fixture(params=[fresh, large], ids=["small", "large"])
def like(request):
    return request.param


@pytest.fixture
def store(tmp_path, like):
    with DiskStore(tmp_path / "store", like) as store:
        yield store


def test_a_store_on_disk_equals_one_in_memory(store, like):
    reference = MemoryStore(like)
    for step, cids in enumerate([["a", 1], ["1", "b", "a"], [1]]):
        memories = {cid: memory(10 * step + i, like) for i, cid in enumerate(cids)}
        reference.put(memories)
        store.commit(step, memories)
        assert content(store) == {cid: plain(reference[cid]) for cid in reference}
        assert list(store) == list(reference)
        assert len(store) == len(reference)
    assert plain(store["new"]) == plain(reference["new"])
    assert store.get("new") is None


def test_a_store_that_is_opened_again_is_what_it_was(store, like):
    store.commit(3, {"a": memory(1, like), "b": memory(2, like)}, server={"x_bar": torch.ones(4)})
    before = content(store)
    store.close()
    with DiskStore(store.folder, like) as again:
        assert content(again) == before
        assert (again.round, again.server()["x_bar"].tolist()) == (3, [1.0] * 4)


def test_redoing_a_commit_changes_nothing(store, like):
    store.commit(0, {"a": memory(0, like)})
    memories, server = {"a": memory(1, like), "b": memory(2, like)}, {"x_bar": torch.ones(3)}
    store.commit(1, memories, server)
    before, named, rounds = content(store), files(store), store.rounds
    store.commit(1, memories, server)
    assert (content(store), files(store), store.rounds) == (before, named, rounds)


def test_superseded_records_are_deleted_once_neither_kept_manifest_names_them(store, like):
    for step in range(6):
        store.commit(step, {"a": memory(step, like)})
        assert len(files(store)) == (min(step + 1, 2) if like is large else 1)
    assert store.rounds == [4, 5]


def test_rolling_back_returns_to_the_commit_before(store, like):
    store.commit(0, {"a": memory(1, like)})
    store.commit(1, {"a": memory(2, like), "b": memory(3, like)})
    before = content(store)
    store.commit(2, {"b": memory(4, like), "c": memory(5, like)})
    store.roll_back()
    assert content(store) == before
    assert store.rounds == [1]
    with pytest.raises(ValueError, match="no older manifest"):
        store.roll_back()


def test_staged_records_are_visible_only_after_their_commit(store, like):
    new, changed = memory(1, like), memory(2, like)
    store.stage("a", new, 0)
    store.stage("b", memory(3, like), 0)
    store.stage("c", memory(4, like), 0)
    assert (list(store), store.get("a")) == ([], None)
    store.commit(0, {"a": new, "b": changed, "c": None})
    assert content(store) == {"a": plain(new), "b": plain(changed), "c": plain(memory(4, like))}
    assert len(files(store)) == (3 if like is large else 1)


def test_what_was_staged_and_not_committed_is_removed(store, like):
    store.stage("a", memory(1, like), 0)
    store.commit(0, {"b": memory(2, like)})
    assert (list(store), len(files(store))) == (["b"], 1)
    with pytest.raises(ValueError, match="'a' was not staged"):
        store.commit(1, {"a": None})
    store.stage("a", memory(1, like), 1)
    store.close()
    with DiskStore(store.folder, like) as again:
        assert (list(again), len(files(again))) == (["b"], 1)


def test_prefetched_records_are_what_is_read(tmp_path, like):
    with DiskStore(tmp_path, like) as store:
        store.commit(0, {i: memory(i, like) for i in range(6)})
        before = content(store)
    with DiskStore(tmp_path, like, cache_bytes=2 * 2**20 + 100) as store:
        store.prefetch([0, 1, 2, 3, 99])
        store.commit(1, {1: memory(11, like)})  # meanwhile
        before[1] = plain(memory(11, like))
        assert content(store) == before
        assert store._reader.recent.bytes <= store._reader.recent.most


def test_summaries_come_from_the_index(store, like):
    store.commit(4, {"a": memory(7, like, layout=2)})
    summary = store.summary("a")
    assert (summary.visits, summary.cost, summary.round, summary.layout) == (7, Cost(7, 2, 3, 4), 4, 2)
    assert summary.bytes > like().x_i.nbytes
    assert dict(store.summaries()) == {"a": summary}
    assert store.summary("b") is None


def test_a_snapshot_stays_as_it_was_and_restores(store, like, tmp_path):
    store.commit(0, {"a": memory(1, like), "b": memory(2, like)})
    store.commit(1, {"a": memory(3, like)})
    before = content(store)
    manifest = store.snapshot(tmp_path / "saved")
    assert manifest["round"] == 1
    for step in range(2, 5):
        store.commit(step, {"a": memory(10 + step, like), "b": memory(20 + step, like)})
    assert verify_snapshot(tmp_path / "saved") == []
    store.close()
    with DiskStore.restore(tmp_path / "saved", store.folder, like) as again:
        assert (content(again), again.rounds) == (before, [1])
        again.commit(2, {"c": memory(9, like)})
    assert verify_snapshot(tmp_path / "saved") == []
    assert not [
        p for p in (tmp_path / "saved").iterdir() if p.name not in ("records", "index.sqlite3", "manifest.json")
    ]


def test_a_new_store_forgets_what_the_folder_held(store, like):
    store.commit(0, {"a": memory(1, like)})
    store.close()
    with DiskStore(store.folder, like, new=True) as again:
        assert (list(again), again.round, files(again)) == ([], None, [])


def test_a_second_writer_is_refused_and_told_the_first(store, like):
    with pytest.raises(LeaseError, match=f"process {os.getpid()} on"):
        DiskStore(store.folder, like)


def test_a_failed_write_leaves_the_store_as_it_was(store, like, monkeypatch):
    store.commit(0, {"a": memory(1, like)})
    before, named = content(store), files(store)

    def full(descriptor, view):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "_write_all", full)
        store.stage("b", memory(2, like), 1)
        with pytest.raises(WriteError, match=r"Cannot write .*records.* bytes\): No space left"):
            store.commit(1, {"a": memory(5, like), "b": None})
    assert (content(store), files(store), store.rounds) == (before, named, [0])
    store.commit(1, {"a": memory(5, like), "b": memory(2, like)})
    assert content(store) == {"a": plain(memory(5, like)), "b": plain(memory(2, like))}


def test_a_child_reads_by_location_and_is_refused_the_store(store, like):
    store.commit(0, {"a": memory(1, like)})
    where = store.locate("a")
    store.quiesce()
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(RuntimeError, match="belongs to process"):
                store.get("a")
            store.close()
            os._exit(0 if torch.equal(read(where).tensors["x_i"], memory(1, like).state.x_i) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.commit(1, {"a": memory(2, like)})
    assert plain(store["a"]) == plain(memory(2, like))


def test_a_removed_client_is_new_again(store, like):
    store.commit(0, {"a": memory(1, like), "b": memory(2, like)})
    store.commit(1, {"b": memory(3, like)}, removed=["a", "never there"])
    assert content(store) == {"b": plain(memory(3, like))}
    assert store["a"].visits == 0
    store.commit(1, {"b": memory(3, like)}, removed=["a"])
    assert store.rounds == [0, 1]
    store.close()
    with DiskStore(store.folder, like) as again:
        assert list(again) == ["b"]


def test_clients_may_be_committed_while_they_are_iterated(store, like):
    store.commit(0, {i: memory(i, like) for i in range(5)})
    for cid in store:
        store.put({cid: memory(cid + 10, like)})
    assert content(store) == {i: plain(memory(i + 10, like)) for i in range(5)}


def test_a_row_of_a_stack_does_not_keep_the_stack_in_memory(tmp_path):
    with DiskStore(tmp_path, fresh) as store:
        stack = torch.randn(100, 5)
        store.commit(0, {"a": Memory(State(stack[3], stack[4]), 1)})
        assert store["a"].state.x_i.untyped_storage().nbytes() == 20
        assert torch.equal(store["a"].state.x_i, stack[3])


def test_what_does_not_fit_the_disk_is_refused_with_the_sum(store):
    store.check_space(1)
    with pytest.raises(OSError, match=r"needs 1,000,000,000,000,000,000 bytes, but its disk has only"):
        store.check_space(10**18)


def test_a_snapshot_needs_a_folder_of_its_own(store, like, tmp_path):
    store.commit(0, {"a": memory(1, like)})
    store.snapshot(tmp_path / "saved")
    with pytest.raises(FileExistsError, match="is not empty"):
        store.snapshot(tmp_path / "saved")
    assert verify_snapshot(tmp_path / "saved") == []


def test_a_snapshot_is_copied_where_links_fail(store, like, tmp_path, monkeypatch):
    store.commit(0, {"a": memory(1, like)})

    def refuse(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    store.snapshot(tmp_path / "saved")
    assert verify_snapshot(tmp_path / "saved") == []
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "saved" / "records").iterdir())
    with DiskStore.restore(tmp_path / "saved", tmp_path / "again", like) as again:
        assert content(again) == content(store)


def test_a_moved_snapshot_is_restored(store, like, tmp_path):
    store.commit(0, {"a": memory(1, like)})
    store.snapshot(tmp_path / "saved")
    (tmp_path / "else").mkdir()
    (tmp_path / "saved").rename(tmp_path / "else" / "where")
    with DiskStore.restore(tmp_path / "else" / "where", tmp_path / "again", like) as again:
        assert content(again) == content(store)

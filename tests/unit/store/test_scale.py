"""Commits do not depend on how many clients have been visited, and leave nothing growing but the records."""

import os
import time

import pytest
import torch
from helpers.memories import State, files

from lightning_fed.core.memory import Memory
from lightning_fed.store import DiskStore

SOAK = bool(os.environ.get("LIGHTNING_FED_SOAK"))
SIZE = 2304 if SOAK else 50  # entries of each of two vectors: 18 kB


def fresh():
    return State(torch.zeros(SIZE), torch.zeros(SIZE))


def visit(store, round, cids):
    old = {cid: store[cid] for cid in cids}
    store.commit(round, {c: Memory(State(m.state.x_i + 1, torch.randn(SIZE)), m.visits + 1) for c, m in old.items()})


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drawn(population, cohort):
    return torch.randperm(population)[:cohort].tolist()


def test_disk_and_descriptors_stay_bounded_over_many_rounds(ram):
    population, rounds = (10_000, 500) if SOAK else (200, 150)
    with DiskStore(ram, fresh, cache_bytes=2**22) as store:
        began = time.process_time()
        for round in range(rounds):
            visit(store, round, drawn(population, 10))
            if round == rounds // 2:
                descriptors, memory = len(os.listdir("/proc/self/fd")), resident()
        spent = (time.process_time() - began) / (10 * rounds)
        print(f"{1000 * spent:.3f} ms of CPU time per visit")
        assert not SOAK or spent < 1e-3
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert resident() - memory < 2**24
        assert sum(summary.visits for _, summary in store.summaries()) == 10 * rounds
        alive = sum(summary.bytes for _, summary in store.summaries())
        used = sum((ram / "records" / name).stat().st_size for name in files(store))
        assert used < 3 * alive + 2**25


@pytest.mark.skipif(not SOAK, reason="takes minutes")
def test_commits_and_opening_do_not_depend_on_how_many_were_visited(tmp_path):
    def rounds(store, begin):
        times = []
        for round in range(begin, begin + 50):
            cids = drawn(100_000, 10)
            began = time.process_time()  # another process would be counted by the clock
            visit(store, round, cids)
            times.append(time.process_time() - began)
        return sorted(times)[25]

    with DiskStore(tmp_path, fresh, cache_bytes=2**22) as store:
        first = rounds(store, 0)
        for round in range(100, 170):
            visit(store, round, drawn(100_000, 1000))
        assert len(store) > 40_000
        last = rounds(store, 200)
    began = time.perf_counter()
    with DiskStore(tmp_path, fresh) as store:
        opened = time.perf_counter() - began
        assert len(store) > 40_000
    print(
        f"CPU ms per visit: {first * 100:.2f} at first, {last * 100:.2f} with 50,000 visited; opened in {opened:.2f} s"
    )
    assert opened < 5
    assert last < 2 * first + 0.002  # every other client has a record to be read by now

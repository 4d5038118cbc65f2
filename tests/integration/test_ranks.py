"""Several processes run one federation: they end with the bits of one, also when one of them is lost on the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers import ranks as script
from helpers.ranks import CASES
from torch.distributed import HashStore
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.core.messages import Broadcast
from lightning_fed.core.summation import TreeSum
from lightning_fed.data.sketch import sketch
from lightning_fed.engines.ranks import plan, summed
from lightning_fed.trainer.agreement import check_optimizers_alike
from lightning_fed.trainer.ranks import RankError, Ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be stopped"),
    pytest.mark.filterwarnings("ignore"),
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Loopback alone, one thread, and nothing of an outer launcher."""
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(Path(script.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}
    kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")}
    return {**kept, **ours}


def command(folder: Path, cases: list[str], strategy: str = "federated", nodes: int = 1, **told: Any) -> list[str]:
    devices = told.pop("devices", 2)
    said = {"folder": str(folder), "strategy": strategy, "devices": devices, "nodes": nodes, "cases": cases, **told}
    return [str(script.__file__), json.dumps(said)]


def run(folder: Path, cases: list[str], *args: str, **told: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    ask = [sys.executable, *args, *command(folder, cases, **told)]
    return subprocess.run(ask, env=environment(), cwd=folder, capture_output=True, text=True, timeout=200)


def found(folder: Path, case: str, rank: int = 0) -> dict[str, Any]:
    return dict(torch.load(folder / f"{case}-{rank}.pt"))


def check_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for part in ("model", "clients"):
        assert ours[part].keys() == theirs[part].keys()
        for name, value in ours[part].items():
            assert torch.equal(value, theirs[part][name]), name


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Results of a single process, by case."""
    folder, known = tmp_path_factory.mktemp("alone"), dict[str, dict[str, Any]]()

    def result(case: str) -> dict[str, Any]:
        if case not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lightning_fed.engines.vectorized.STACK", 2)
                known[case] = script.fit(case, folder, devices=1)
        return known[case]

    return result


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have run every case, with a CSV log."""
    folder = tmp_path_factory.mktemp("two")
    done = run(folder, list(CASES), csv=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_bits_of_one(case: str, two: Path, alone: Any) -> None:
    for rank in (0, 1):
        check_equal(found(two, case, rank), alone(case))


@pytest.mark.parametrize("case", CASES)
def test_they_log_what_one_logs(case: str, two: Path, alone: Any) -> None:
    ours, theirs = found(two, case)["metrics"], alone(case)["metrics"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name == "train_loss":  # a mean of means
            assert ours[name] == pytest.approx(value, rel=1e-5)
        else:
            assert ours[name] == value or ours[name] != ours[name], name


@pytest.mark.parametrize("case", CASES)
def test_rounds_that_are_over_hold_no_states(case: str, two: Path) -> None:
    """The engine of a round is part of a cycle, so that gigabytes would wait for the garbage collector."""
    assert found(two, case)["held"] == 0


def test_one_process_writes_the_files(two: Path) -> None:
    for case in CASES:
        assert [path.name for path in (two / "csv" / case).iterdir()] == ["version_0"]
    tables = [path.read_text() for path in (two / "csv" / "scaffold" / "version_0").glob("*.csv")]
    (table,) = [text for text in tables if text.startswith("step,client,")]
    rows = [row.split(",")[:2] for row in table.splitlines()]
    assert rows == [["step", "client"], *([str(script.ROUNDS - 1), str(cid)] for cid in range(9))]
    assert not list(two.rglob("client_memory/*/rank-*"))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(two: Path, alone: Any, tmp_path: Path) -> None:
    """Saved by two and resumed by one, and the other way, with memories in RAM and on disk."""
    cases = ["fedadmm, batchnorm", "disk, large"]
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_fed.engines.vectorized.STACK", 2)
            script.fit(case, tmp_path / "one", rounds=2, devices=1)
    saved = run(tmp_path / "by two", cases, rounds=2)
    assert saved.returncode == 0, saved.stderr[-3000:]
    for case in cases:
        last = tmp_path / "by two" / case / "last.ckpt"
        check_equal(script.fit(case, tmp_path / "resumed", ckpt_path=last, devices=1), alone(case))
    resumed = run(tmp_path / "two", cases, strategy="ddp", resume=str(tmp_path / "one"))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    for case in cases:
        check_equal(found(tmp_path / "two", case), alone(case))


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_processes_die_and_stop(alone: Any, tmp_path: Path) -> None:
    """One is killed in round 1, one is stopped in round 2: twice the run goes on from the last committed round."""
    faults = [[1, 1, "SIGKILL"], [1, 2, "SIGSTOP"]]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    torchrun += ["--monitor-interval=3"]  # shorter, it may end the other process before that has said what it misses
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    case = "fedadmm, batchnorm"
    done = run(tmp_path, [case], *torchrun, fault=faults, timeout=8, resume="last")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("fault-*")} == {"fault-0", "fault-1"}
    assert "round 1: rank 0 of 2 got no answer from rank 1" in done.stderr
    assert "round 2: rank 0 of 2 got no answer from rank 1" in done.stderr
    check_equal(found(tmp_path, case), alone(case))


@pytest.mark.slow
def test_two_nodes_under_torchrun_end_with_the_bits_of_one(alone: Any, tmp_path: Path) -> None:
    case, port = "scaffold", free_port()
    nodes = []
    for k in (0, 1):
        ask = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={k}", "--nproc-per-node=1"]
        ask += ["--master-addr=127.0.0.1", f"--master-port={port}", *command(tmp_path, [case], devices=1, nodes=2)]
        nodes.append(subprocess.Popen(ask, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=200)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said[0][-3000:]
    for rank in (0, 1):
        check_equal(found(tmp_path, case, rank), alone(case))


@pytest.mark.slow
def test_a_stopped_process_ends_the_run_with_its_name(tmp_path: Path) -> None:
    done = run(tmp_path, ["fedadmm, batchnorm"], fault=[[1, 1, "SIGSTOP"]], timeout=8)
    assert done.returncode not in (0, None)
    assert "RankError: round 1: rank 0 of 2 got no answer from rank 1" in done.stderr


@pytest.mark.slow
def test_a_notebook_forks_its_processes(alone: Any, tmp_path: Path) -> None:
    """The model, the history and the results by client come back to the process that called fit."""
    case = "fedadmm, batchnorm"
    done = run(tmp_path, [case], strategy="federated_notebook", saves=False, fork=True)
    assert done.returncode == 0, done.stderr[-3000:]
    forked = torch.load(tmp_path / "forked.pt")
    for name, value in alone(case)["model"].items():
        assert torch.equal(forked["model"][name], value), name
    metrics = alone(case)["metrics"]
    assert [row["round"] for row in forked["history"]] == list(range(script.ROUNDS))
    assert forked["history"][-1]["federated/objective"] == metrics["federated/objective"]
    assert [row["client"] for row in forked["clients"]] == list(range(9))
    assert sum(row["visits"] for row in forked["clients"]) == 5 * script.ROUNDS


# -- the pieces -----------------------------------------------------------------------------------------------------


def in_threads(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What ``work`` gives in each of several ranks, which are threads."""
    store, results, errors = HashStore(), [None] * size, list[BaseException]()

    def be(rank: int) -> None:
        try:
            results[rank] = work(Ranks.meet(store, rank, size, timedelta(seconds=20)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("cohort", [1, 2, 7, 33])
def test_blocks_are_summed_in_the_order_of_the_tree(size: int, cohort: int) -> None:
    rng = torch.Generator().manual_seed(cohort)
    messages = Broadcast(
        torch.randn(cohort, 6, generator=rng) * 10.0 ** torch.randint(-8, 8, (cohort, 1), generator=rng)
    )
    weights = torch.rand(cohort, generator=rng).tolist()
    whole = TreeSum()
    whole.add(messages, weights)
    blocks = plan(weights, size)

    def total(ranks: Ranks) -> Any:
        sums = {}
        for k, block in enumerate(blocks):
            if block.rank == ranks.rank:
                part = TreeSum()
                cut = slice(block.positions.start, block.positions.stop)
                part.add(Broadcast(messages.x_bar[cut]), weights[cut])
                sums[k] = part.value()
        return summed(ranks, [block.rank for block in blocks], sums, Broadcast(torch.empty(0, 6)))

    for found_sum in in_threads(size, total):
        assert torch.equal(found_sum.x_bar, whole.value().x_bar)


def test_a_plan_gives_the_longest_visits_first_to_who_has_least() -> None:
    blocks = plan([1.0, 9.0, 1.0, 8.0, 1.0], 2)
    by_rank = {rank: [i for b in blocks if b.rank == rank for i in b.positions] for rank in (0, 1)}
    assert by_rank == {0: [1, 2], 1: [0, 3, 4]}
    assert {len(block.positions) for block in plan([1.0] * 1024, 2)} == {128}


def test_ranks_exchange_objects_of_any_size() -> None:
    def work(ranks: Ranks) -> Any:
        mine = {"large": torch.full((300_000 * (1 + ranks.rank),), float(ranks.rank)), "empty": torch.empty(0, 3)}
        return ranks.gather({**mine, "text": "x" * 10**6 * ranks.rank})

    for got in in_threads(3, work):
        assert [len(each["text"]) for each in got] == [0, 10**6, 2 * 10**6]
        assert [each["large"].sum().item() for each in got] == [0.0, 600_000.0, 1_800_000.0]


def test_an_error_in_one_rank_is_raised_in_all() -> None:
    def fails(ranks: Ranks) -> Any:
        def work() -> None:
            if ranks.rank == 1:
                raise KeyError("data of client 7")

        with pytest.raises(KeyError, match="client 7") as error:
            ranks.together(work)
        return str(error.value)

    assert in_threads(2, fails) == ["'data of client 7'"] * 2


def test_something_that_cannot_be_sent_is_an_error_in_all_ranks() -> None:
    def fails(ranks: Ranks) -> str:
        ranks.doing = "round 3"
        with pytest.raises(ValueError, match="round 3: rank 1 of 2 has something that cannot be sent") as error:
            ranks.gather((lambda: None) if ranks.rank == 1 else "anything")
        return str(error.value)

    assert len({*in_threads(2, fails)}) == 1


def test_ranks_with_other_data_are_refused() -> None:
    def check(ranks: Ranks) -> str:
        with pytest.raises(
            ValueError, match=r"Rank . has clients .*rank . has .*seed whatever deals the data"
        ) as error:
            ranks.check_same({"clients": {"ann": 3 + ranks.rank}})
        return str(error.value)

    assert in_threads(2, check)[0].startswith("Rank 0 has clients {'ann': 3}, rank 1 has {'ann': 4}.")


def test_data_dealt_with_another_seed_are_other_data() -> None:
    """As many samples for each client, and others."""
    whole = TensorDataset(torch.randn(60, 2), torch.arange(60))

    def dealt(seed: int, kind: Callable[[Any], Any]) -> FederatedDataModule:
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        return FederatedDataModule([Subset(kind(whole), part.tolist()) for part in order.split(20)])

    for kind in (lambda held: held, Unread):
        found = [sketch(data, data.client_ids) for data in (dealt(1, kind), dealt(1, kind), dealt(2, kind))]
        assert found[0] == found[1]
        assert all(found[0][cid] != found[2][cid] for cid in range(3))


class Unread(Dataset[Any]):
    """Samples that are not in memory, and must not be read."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, i: int) -> Any:
        raise AssertionError


def test_optimisers_with_other_settings_are_refused() -> None:
    def check(ranks: Ranks) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1 * (1 + ranks.rank))
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(ranks=ranks), optimizers=[optimizer])
        with pytest.raises(ValueError, match=r"has optimizers .*'lr': '0.[12]'"):
            check_optimizers_alike(trainer)

    in_threads(2, check)


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("call", [Ranks.barrier, lambda ranks: ranks.receive(torch.empty(1), 1 - ranks.rank)])
def test_a_rank_that_does_not_come_is_named(call: Callable[[Ranks], Any], absent: int) -> None:
    """Within the timeout, whichever it is."""
    over = threading.Event()

    def wait(ranks: Ranks) -> bool:
        ranks.timeout, ranks.doing = timedelta(seconds=0.5), "round 7"
        if ranks.rank == absent:
            return over.wait(20)
        with pytest.raises(RankError, match=f"round 7: rank {1 - absent} of 2 got no answer from rank {absent}"):
            call(ranks)
        over.set()
        return True

    assert in_threads(2, wait) == [True, True]


@pytest.mark.parametrize("strategy", ["federated", "federated_fork", "federated_notebook", "federated_spawn"])
def test_the_strategy_is_known_by_name(strategy: str) -> None:
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=3, barebones=True)
    assert (type(trainer.strategy).__name__, trainer.world_size) == ("FederatedStrategy", 3)


def test_every_process_evaluates_all_batches_without_a_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would deal them out, and nothing reduces what each process measures on its share."""
    trainer = pl.Trainer(strategy="federated", accelerator="cpu", devices=2, barebones=True)
    trainer.state.fn = "validate"
    monkeypatch.setattr("pytorch_lightning.strategies.ParallelStrategy.setup", lambda *_: None)
    trainer.strategy.setup(trainer)
    assert not trainer._accelerator_connector.use_distributed_sampler


def test_trainers_of_one_script_meet_in_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is ahead would connect to the store of the trainer before, which is about to end."""
    made = []
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_, **__: iter([(made.append(1) or HashStore(), 0, 1)]))
    monkeypatch.setattr("lightning_fed.trainer.strategy._STORES", {})
    for _ in range(2):
        pl.Trainer(strategy="federated", accelerator="cpu", devices=1, barebones=True).strategy.setup_distributed()
    assert len(made) == 1


def test_a_fit_without_a_server_is_refused() -> None:
    """Its processes would train models of their own."""
    trainer = pl.Trainer(strategy="federated", accelerator="cpu", devices=2, barebones=True)
    trainer.state.fn = "fit"  # not through fit, which would start processes first
    with pytest.raises(ValueError, match="none among the callbacks"):
        trainer.strategy.setup(trainer)

"""Seconds per round of one and of two processes, and what the exchange between processes takes.

    python benchmarks/ranks.py [W1 W3 ...] [--rounds 6]

For each workload: one process, two ranks (``strategy="federated"``), and two forked workers (``workers=2``), one after
another in one run, each with one thread. Medians of rounds after the first. CPU seconds are those of all processes.
The exchange is measured alone: two processes sum one message of each size, and tell each other one state.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
WAYS: dict[str, dict[str, Any]] = {
    "1 process": {},
    "2 ranks": {"devices": 2, "strategy": "federated"},
    "2 workers": {"workers": 2},
}


def fit(name: str, way: str, rounds: int, folder: Path) -> None:
    """Run in a process of its own: fit, and write the seconds of each round."""
    import pytorch_lightning as pl
    import torch
    from contestants.ours import federation, model
    from workloads import WORKLOADS, prepare

    from lightning_fed import FederatedServer
    from lightning_fed.algorithms import FedADMM

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    workload, options = WORKLOADS[name], dict(WAYS[way])
    if not workload.samples:
        prepare()
    workers = options.pop("workers", 1)
    admm = FedADMM(eta=workload.eta, start="local")
    shared = {"local_steps": workload.steps, "evaluate_every": 0, "figure": False, "workers": workers}
    server = FederatedServer(admm, clients_per_round=workload.cohort, **shared)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=rounds, callbacks=[server], default_root_dir=folder, accelerator="cpu", **options, **quiet
    )
    trainer.fit(model(workload, log_train=False), datamodule=federation(workload))
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    spent = sum(u.ru_utime + u.ru_stime for u in (own, children))
    seconds = [row["federated/seconds"] for row in server.history]
    found = {
        "seconds": seconds,
        "cpu": spent,
        "memory": own.ru_maxrss,
        "sent": getattr(trainer.strategy, "ranks", None),
    }
    found["sent"] = found["sent"].sent if found["sent"] else 0
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def measure(name: str, way: str, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        ask = [sys.executable, __file__, "--fit", name, way, str(rounds), folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(ask, env=env, check=True, capture_output=True)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def exchange(rank: int, port: int, numbers: int, repeats: int, results: Any) -> None:
    """Sum a message over two processes, and tell each other a state, ``repeats`` times."""
    import torch
    from torch.distributed import TCPStore

    from lightning_fed.core.messages import Broadcast
    from lightning_fed.engines.ranks import summed
    from lightning_fed.trainer.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks.meet(TCPStore("127.0.0.1", port, 2, rank == 0), rank, 2, timedelta(minutes=1))
    total, like = Broadcast(torch.randn(numbers, dtype=torch.float64)), Broadcast(torch.empty(0, numbers))
    taken: dict[str, list[float]] = {"gather an empty answer": [], "sum one message": [], "tell one state": []}
    for _ in range(repeats):
        calls = [lambda: ranks.gather(None), lambda: summed(ranks, [0, 1], {rank: total}, like)]
        calls.append(lambda: ranks.gather(torch.zeros(numbers)))
        for what, call in zip(taken, calls, strict=True):
            ranks.barrier()
            began = time.perf_counter()
            call()
            taken[what].append(time.perf_counter() - began)
    if rank == 0:
        results.put({what: statistics.median(times) for what, times in taken.items()})


def exchanges() -> None:
    import socket

    import torch.multiprocessing as mp

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print("| two processes, ms | " + " | ".join(["empty answer", "sum of two messages", "one state each way"]) + " |")
    for numbers, repeats in ((2_282, 200), (6_600_000, 15)):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(exchange_of, args=(port, numbers, repeats, results), nprocs=2)
        taken = results.get()
        print(f"| {numbers:,} parameters | " + " | ".join(f"{1e3 * t:.2f}" for t in taken.values()) + " |", flush=True)


def exchange_of(rank: int, *args: Any) -> None:
    exchange(rank, *args)


def main(names: list[str], rounds: int) -> None:
    exchanges()
    print("\n| workload | way | s per round | CPU s, all processes | MB sent per round | MB of memory, first process |")
    for name in names:
        for way in WAYS:
            found = measure(name, way, rounds)
            median = statistics.median(found[0]["seconds"][1:])
            cpu, sent = sum(each["cpu"] for each in found), sum(each["sent"] for each in found) / rounds / 1e6
            shown = f"{median:.3g} | {cpu:.1f} | {sent:.2f} | {found[0]['memory'] / 1024:.0f}"
            print(f"| {name} | {way} | {shown} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:  # one measurement, in a process of its own
        fit(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("workloads", nargs="*", metavar="W", help="W1, W2 or W3; all of them by default")
        parser.add_argument("--rounds", type=int, default=6, help="rounds of each fit, the first of which is left out")
        asked = parser.parse_args()
        if unknown := {*asked.workloads} - {"W1", "W2", "W3"}:
            parser.error(f"there are W1, W2 and W3, not {', '.join(sorted(unknown))}")
        if asked.rounds < 2:
            parser.error(f"--rounds must be 2 or more, because the first is left out, got {asked.rounds}")
        main(asked.workloads or ["W1", "W2", "W3"], asked.rounds)

"""What the disk store costs in time, and peak memory beside a hand-written loop: python benchmarks/stores.py --help

Contestants run in processes of their own and take turns, one round each, so that a slow spell of the machine hits all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from field import CONTESTANTS, LOOPS, Contestant, Player, machine
from workloads import WORKLOADS, Workload, prepare

PATIENCE = 900.0
OURS = ("ours", "ours, compiled")


def play_in_turn(field: Sequence[Contestant], workload: Workload, rounds: int, quiet: float) -> list[Player]:
    """Play ``rounds`` of each contestant in turn after a first one, and return the players, with ``turns``, stopped."""
    players = [Player(contestant, workload, PATIENCE) for contestant in field]
    try:
        for k in range(rounds + 1):
            for player in players if k % 2 else reversed(players):  # whoever comes second finds warmer caches
                turn = player.play(quiet)
                print(f"  {player.contestant.name}: {turn['wall']:.2f} s, {turn['cpu']:.2f} s of CPU", flush=True)
                if k:
                    player.turns.append(turn)
    finally:
        for player in players:
            player.stop()
    return players


def slow_down(rounds: int, steps: int, folder: str, quiet: float) -> None:
    """Compare rounds of the FEMNIST CNN with memories in RAM and on disk; all clients are visited often."""
    workload = replace(WORKLOADS["W2"], steps=steps, clients=20)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options: dict[str, dict[str, Any]] = {"memory": {}, "disk": {"store_dir": scratch}}
        field = [
            Contestant(store, "ours", options={"threads": 1, "store": store, **more}) for store, more in options.items()
        ]
        players = play_in_turn(field, workload, rounds, quiet)
    print(f"{workload.describe()}: {rounds} rounds of each store in turn")
    for clock in ("wall", "cpu"):
        seconds = [[turn[clock] for turn in player.turns] for player in players]
        ram, disk = map(statistics.median, seconds)
        pairs = statistics.median(b / a for a, b in zip(*seconds, strict=True))
        print(f"  {clock}: {ram:.3f} s in RAM, {disk:.3f} s on disk, ratio {disk / ram:.3f}, of pairs {pairs:.3f}")


def peaks(names: Sequence[str], rounds: int, steps: int, quiet: float) -> None:
    """Compare the peak memory of ours and of the hand-written loop after as many rounds, of any number of steps."""
    prepare()
    for name in names:
        workload = replace(WORKLOADS[name], steps=min(steps, WORKLOADS[name].steps))
        field = [c for c in CONTESTANTS if name in c.workloads and c.name in (LOOPS[0], *OURS)]
        print(f"{name}: {workload.describe()}; {rounds + 1} rounds", flush=True)
        for contestant in field:  # one after another: their memory is no one else's
            (player,) = play_in_turn([contestant], workload, rounds, quiet)
            print(f"  {contestant.name}: peak {player.peak / 1e6:,.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["slowdown", "peak"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300, help="most local steps of a visit")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--dir", default=".", help="where the disk store is, for slowdown")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait for a quiet machine before a round")
    given = parser.parse_args()
    print(machine(), flush=True)
    if given.what == "slowdown":
        slow_down(given.rounds, given.steps, given.dir, given.quiet)
    else:
        peaks(given.workloads, given.rounds, given.steps, given.quiet)


if __name__ == "__main__":
    main()

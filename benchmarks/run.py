"""Ours against a hand-written loop, a Trainer per client, and other frameworks: python benchmarks/run.py [--quick]

Every contestant runs in a process and an environment of its own; as many as fit into memory take turns, one round each,
so that a slow spell of the machine hits all. Start-up is imports, data, and what the first round takes more than
the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
from field import CONTESTANTS, DISTURBED, Contestant, FailedError, Player, machine
from process import available_memory
from venvs import UnavailableError
from workloads import WORKLOADS, Workload, prepare

RESULTS = Path(__file__).parent / "results"
TICKS = 0.03  # seconds, by which the machine's own account is wrong
ROOM = 6 * 2**30  # bytes of memory, without which no other contestant begins
LONG = 10  # seconds, beside which it does not matter that a round is the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", help="those whose names contain one of these")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each, if its --seconds allow")
    parser.add_argument("--seconds", type=float, default=120, help="after which a contestant plays no further round")
    parser.add_argument("--patience", type=float, default=900, help="seconds a single round may take")
    parser.add_argument("--quick", action="store_true", help="small rounds, to see whether everything runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    prepare()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine(), "quick": given.quick, "workloads": {}}
    for name in given.workloads:
        workload = WORKLOADS[name].quick() if given.quick else WORKLOADS[name]
        field = [c for c in CONTESTANTS if name in c.workloads and _wanted(c, given.contestants)]
        rows = compete(field, workload, given.repeats, given.seconds, given.patience)
        found["workloads"][name] = {**asdict(workload), "text": workload.describe(), "rows": rows}
        (given.out / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "bench.md").write_text(report.markdown(found))
    report.chart(found, given.out / "bench.png")
    print(report.markdown(found))


def _wanted(contestant: Contestant, parts: list[str] | None) -> bool:
    return parts is None or any(part.lower() in contestant.name.lower() for part in parts)


def compete(
    field: list[Contestant], workload: Workload, repeats: int, seconds: float, patience: float
) -> dict[str, dict[str, Any]]:
    """What each contestant needs for a round, or why it cannot play."""
    print(f"{workload.name}: {workload.describe()}", flush=True)
    rows: dict[str, dict[str, Any]] = {c.name: {"method": c.method, "rounds": []} for c in field}
    waiting = list(field)
    while waiting:
        players: list[Player] = []
        try:
            while waiting and (not players or available_memory() > ROOM):
                players += _started(waiting.pop(0), workload, patience, rows)
            _play(players, rows, repeats, seconds)
        finally:
            for player in players:
                player.stop()
    return rows


def _started(
    contestant: Contestant, workload: Workload, patience: float, rows: dict[str, dict[str, Any]]
) -> list[Player]:
    """The player, after its first round; nobody if it cannot play."""
    row = rows[contestant.name]
    try:
        player = Player(contestant, workload, patience)
        row["versions"], row["first"] = player.versions, player.play()
    except (UnavailableError, FailedError) as error:
        _fail(row, contestant.name, error)
        return []
    row["ready"] = player.seconds_to_ready
    _tell(contestant.name, "first round", row["first"])
    return [player]


def _play(players: list[Player], rows: dict[str, dict[str, Any]], repeats: int, seconds: float) -> None:
    """Rounds in turn, and what comes of them."""
    able = list(players)
    for _ in range(repeats):
        for player in list(able):
            name = player.contestant.name
            row = rows[name]
            if sum(turn["wall"] for turn in counted(player.contestant, row)) > seconds:
                continue
            try:
                row["rounds"].append(player.play())
                _tell(name, "round", row["rounds"][-1])
            except FailedError as error:
                _fail(row, name, error)
                able.remove(player)
    for player in able:
        row = rows[player.contestant.name]
        row["peak"] = player.peak
        rounds = undisturbed(counted(player.contestant, row))
        row["count"] = len(rounds)
        for clock in ("wall", "cpu"):
            row[clock] = statistics.median(turn[clock] for turn in rounds)
        row["others"] = sum(turn["others"] for turn in rounds) / sum(turn["wall"] for turn in rounds)
        row["start_up"] = row["ready"] + max(0.0, row["first"]["wall"] - row["wall"])


def counted(contestant: Contestant, row: dict[str, Any]) -> list[dict[str, float]]:
    """The first round counts if it takes long and the contestant has nothing to make ready in it."""
    first: dict[str, float] = row["first"]
    late = not contestant.slow_start and first["wall"] > LONG
    return [first] * late + row["rounds"]


def undisturbed(rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    """Those in which the machine was the contestant's own; all if there are none."""
    return [turn for turn in rounds if turn["others"] < DISTURBED * turn["wall"] + TICKS] or rounds


def _tell(name: str, what: str, turn: dict[str, float]) -> None:
    others = f", others meanwhile {turn['others']:.1f} s" if turn["others"] > 0.1 * turn["wall"] else ""
    print(f"  {name}: {what} {turn['wall']:.3f} s, CPU {turn['cpu']:.3f} s{others}", flush=True)


def _fail(row: dict[str, Any], name: str, error: Exception) -> None:
    row["reason"] = str(error)
    print(f"  {name}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

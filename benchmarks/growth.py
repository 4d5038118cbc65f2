"""How seconds and memory of our engines grow: python benchmarks/growth.py

One thing at a time is varied: clients per round, clients in all, parameters, local steps. Every point is a process of
its own, so that its peak is its own too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from field import Contestant, Player, machine
from run import RESULTS
from workloads import Workload

BASE = Workload("growth", "mlp", clients=1_000, cohort=100, steps=20, batch=20, samples=100)

#: By name: what is varied, and how.
SWEEPS: dict[str, tuple[str, tuple[int, ...]]] = {
    "clients per round": ("cohort", (10, 30, 100, 300, 1_000)),
    "clients in all": ("clients", (100, 1_000, 10_000, 100_000)),
    "parameters": ("hidden", (8, 32, 128, 512, 2_048)),
    "local steps": ("steps", (5, 20, 80, 320)),
}
ENGINES: dict[str, dict[str, Any]] = {
    "one by one": {"engine": "sequential"},
    "side by side": {"engine": "vectorized", "compile": False},
    "compiled": {"engine": "vectorized", "compile": True},
}
PATIENCE = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the two smallest of every kind")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    points = []
    for sweep, (name, values) in SWEEPS.items():
        for value in values[: 2 if given.quick else None]:
            for engine in ENGINES:
                point = measure(replace(BASE, **{name: value}), engine, given.repeats)
                points.append({"sweep": sweep, "value": size(name, value), "engine": engine, **point})
                print(f"{sweep} {size(name, value):,}, {engine}: {point['wall']:.3f} s", flush=True)
    (given.out / "growth.json").write_text(json.dumps({"machine": machine(), "points": points}, indent=1) + "\n")
    (given.out / "growth.md").write_text(markdown(points))
    chart(points, given.out / "growth.png")


def size(name: str, value: int) -> int:
    """What is shown on the axis."""
    return (60 + 1 + 10) * value + 10 if name == "hidden" else value


def measure(workload: Workload, engine: str, repeats: int) -> dict[str, float]:
    """Medians after a first round, and the peak of them all."""
    player = Player(Contestant(engine, "ours", options={"threads": 1, **ENGINES[engine]}), workload, PATIENCE)
    player.play()
    rounds = [player.play() for _ in range(repeats)]
    player.stop()
    medians = {clock: statistics.median(turn[clock] for turn in rounds) for clock in ("wall", "cpu")}
    return {**medians, "peak": float(player.peak)}


def markdown(points: list[dict[str, Any]]) -> str:
    lines = [f"# Growth\n\n{machine()}. Where nothing else is said: {BASE.describe()}; float32, one thread.\n"]
    for sweep in dict.fromkeys(point["sweep"] for point in points):
        lines.append(f"| {sweep} | engine | wall, s | CPU, s | peak memory, MB |\n|--:|---|--:|--:|--:|")
        for p in (p for p in points if p["sweep"] == sweep):
            figures = f"{p['wall']:.3f} | {p['cpu']:.3f} | {p['peak'] / 1e6:,.0f}"
            lines.append(f"| {p['value']:,} | {p['engine']} | {figures} |")
        lines.append("")
    return "\n".join(lines)


def chart(points: list[dict[str, Any]], path: Path) -> None:
    """Seconds above, memory below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(4 * len(SWEEPS), 6), sharey="row")
    for column, sweep in enumerate(SWEEPS):
        for engine in ENGINES:
            own = [p for p in points if p["sweep"] == sweep and p["engine"] == engine]
            values = [p["value"] for p in own]
            axes[0, column].loglog(values, [p["wall"] for p in own], "o-", label=engine)
            axes[1, column].semilogx(values, [p["peak"] / 1e6 for p in own], "o-", label=engine)
        axes[1, column].set_xlabel(sweep)
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("seconds per round")
    axes[1, 0].set_ylabel("peak memory, MB")
    axes[0, 0].legend()
    figure.suptitle(BASE.describe(), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()

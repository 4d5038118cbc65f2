"""The benchmark's table and bar chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from field import DISTURBED, IN_LOSS, LOOPS, PEERS

NOTE = (
    "Peers run what they have, plain FedAvg; the loops, Trainer per client and ours run FedADMM, whose steps carry a"
    " penalty and whose clients have a memory."
)


def markdown(found: dict[str, Any]) -> str:
    """Everything in tables."""
    lines = ["# Seconds per round", "", f"{found['machine']}. {NOTE}", ""]
    if found["quick"]:
        lines += ["Small rounds (`--quick`): these figures say nothing.", ""]
    for name, workload in found["workloads"].items():
        rows = {k: row for k, row in workload["rows"].items() if "wall" in row}
        lines += [f"## {name}: {workload['text']}", ""]
        lines += [
            "| | method | wall, s | CPU, s | start-up, s | peak memory, MB | rounds |",
            "|---|---|--:|--:|--:|--:|--:|",
        ]
        for who, row in rows.items():
            figures = f"{row['wall']:.3f} | {row['cpu']:.3f} | {row['start_up']:.1f} | {row['peak'] / 1e6:,.0f}"
            lines.append(f"| {who} | {row['method']} | {figures} | {row['count']} |")
        lines += ["", *ratios(rows)]
        disturbed = {who: row["others"] for who, row in rows.items() if row["others"] > DISTURBED}
        lines += [f"- {who} was disturbed: others used {share:.0%} of a core." for who, share in disturbed.items()]
        lines += [""]
        missing = {who: row["reason"] for who, row in workload["rows"].items() if "reason" in row}
        lines += [f"- {who} {reason}" for who, reason in missing.items()] + [""] * bool(missing)
    return "\n".join([*lines, "## Versions", "", *_versions(found), ""])


def ratios(rows: dict[str, dict[str, Any]]) -> list[str]:
    """How many times as long the others take as ours, by the clock and by CPU time."""
    lines = []
    rivals = {
        "the better loop": LOOPS,
        "one with the penalty in its loss": (IN_LOSS,),
        "the best PyTorch peer": PEERS,
        "FedJAX": ("FedJAX",),
    }
    for who in (name for name in rows if name.startswith("ours")):
        parts = []
        for label, names in rivals.items():
            if known := [name for name in names if name in rows]:
                best = min(known, key=lambda name: rows[name]["wall"])
                wall, cpu = (rows[best][clock] / rows[who][clock] for clock in ("wall", "cpu"))
                parts.append(f"{label} ({best}) takes {wall:.1f}x as long, {cpu:.1f}x the CPU time")
        if parts:
            lines.append(f"- {who}: {'; '.join(parts)}.")
    return lines


def _versions(found: dict[str, Any]) -> list[str]:
    known: dict[str, str] = {}
    for workload in found["workloads"].values():
        for who, row in workload["rows"].items():
            if "versions" in row:
                known[who] = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
    return [f"- {who}: {text}" for who, text in known.items()]


def chart(found: dict[str, Any], path: Path) -> None:
    """Bars by workload, wall and CPU time side by side, logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    workloads = found["workloads"]
    figure, axes = plt.subplots(1, len(workloads), figsize=(5.2 * len(workloads), 4.2), squeeze=False)
    for axis, (name, workload) in zip(axes[0], workloads.items(), strict=True):
        rows = {who: row for who, row in workload["rows"].items() if "wall" in row}
        order = sorted(rows, key=lambda who: -rows[who]["wall"])
        colours = ["tab:orange" if who.startswith("ours") else "tab:blue" for who in order]
        places = range(len(order))
        axis.barh([p + 0.2 for p in places], [rows[w]["wall"] for w in order], 0.4, color=colours)
        axis.barh([p - 0.2 for p in places], [rows[w]["cpu"] for w in order], 0.4, color=colours, alpha=0.45)
        for place, who in zip(places, order, strict=True):
            axis.annotate(f" {rows[who]['wall']:.3g}", (rows[who]["wall"], place + 0.2), va="center", fontsize=8)
        axis.set_yticks(list(places), order)
        axis.set_xscale("log")
        axis.margins(x=0.15)
        axis.set_xlabel("seconds per round (pale: CPU time)")
        axis.set_title(f"{name}: {workload['text'].replace(', ', chr(10), 1)}", fontsize=9)
    figure.suptitle("FedADMM (loops, Trainer per client, ours) and FedAvg (the others)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)

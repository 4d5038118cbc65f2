"""``lightning-fed compare``: run all algorithms on the synthetic sets, and write a table and a figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import wandb

from lightning_fed.cli.commands.reproduce import QUICK_ROUNDS, QUICK_STEPS, whole_number
from lightning_fed.cli.experiments import comparison, report
from lightning_fed.cli.experiments.comparison import FAMILY, FIRST_ROUNDS, ON_WRITERS
from lightning_fed.cli.experiments.drive import drive
from lightning_fed.cli.experiments.run import Execution, Recipe, Run
from lightning_fed.cli.experiments.settings import femnist, parse_algorithm, synthetic
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.tracking import AutoWandbLogger, log_figure


def main(args: list[str] | None = None) -> None:
    parser = _parser()
    asked = parser.parse_args(args)
    default = FAMILY if asked.data is None else ON_WRITERS
    if asked.quick:
        default = dict.fromkeys(default, ())
    family: dict[str, tuple[str, ...]] = default if asked.only is None else dict.fromkeys(asked.only, ())
    try:
        runs = _runs(asked, comparison.labels(family))
        for run in runs:
            run.check()
    except ValueError as error:
        parser.error(str(error))
    if not asked.report:
        drive(runs)
    _report(runs, family)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "lightning-fed compare",
        description="Run all algorithms with the paper's settings (10 of 30 clients, or all if an algorithm needs them;"
        " 300 SGD steps of batch 2, step size 0.01) and the same seeds; write loss, accuracy, bytes and local work to a"
        " table, CSV, figure and W&B. Repeat an interrupted command to resume it.",
    )
    parser.add_argument("--rounds", type=whole_number, help="number of rounds (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--sets", type=float, nargs="+", help="a = b of the synthetic sets (default: 0 0.5 1)")
    parser.add_argument(
        "--data",
        type=Path,
        help="FEMNIST as LEAF JSON, npz by writer, parquet or NIST: compare on 30 of its writers, with LEAF's network",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="run only these: FedAvg FedProx:mu=1 FedAvg+TopK:k=99"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"try it: {QUICK_ROUNDS} rounds of {QUICK_STEPS} steps with one seed and default settings, on one set",
    )
    parser.add_argument("--report", action="store_true", help="report on existing runs; run nothing")
    parser.add_argument(
        "--evaluate-every",
        type=whole_number,
        help="rounds between evaluations (default: 5); 1, 2, 3 and the last are always evaluated",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float32", help="precision of the model and the messages"
    )
    parser.add_argument("--threads", type=whole_number, default=1, help="number of torch's threads")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    return parser


def _runs(asked: argparse.Namespace, labels: Sequence[str]) -> list[Run]:
    """All runs, ordered by seed, so that runs can be compared early."""
    out: Path = asked.out / "quick" if asked.quick else asked.out
    recipe = Recipe(
        rounds=asked.rounds or (QUICK_ROUNDS if asked.quick else 100),
        local_steps=QUICK_STEPS if asked.quick else 300,
        dtype=asked.dtype,
        evaluate_every=asked.evaluate_every or (1 if asked.quick else 5),
        evaluate_also=(*FIRST_ROUNDS, *comparison.MARKS),
    )
    real = asked.data is not None
    # runs on synthetic sets are short, but share compiled code; the network of the writers is not compiled
    compile: bool | Literal["auto"] = "auto" if real or asked.quick else True
    execution = Execution(threads=asked.threads, compile=compile, keep_checkpoint=real and not asked.quick)
    sets = asked.sets or ([1.0] if asked.quick else [0.0, 0.5, 1.0])
    settings = [femnist(asked.data, small=asked.quick)] if real else [synthetic(s) for s in sets]
    return [
        Run(setting, label, parse_algorithm(label), seed, out, recipe, execution, experiment="compare")
        for seed in (asked.seeds[:1] if asked.quick else asked.seeds)
        for setting in settings
        for label in labels
    ]


def _report(runs: Sequence[Run], family: dict[str, tuple[str, ...]]) -> None:
    """Tables, CSV and figure of the runs that have begun."""
    begun = [run for run in runs if run.facts()]
    if not begun:
        print("There are no runs to report on yet.")
        return
    folder, text = runs[0].out, []
    settings = report.grouped(begun)
    for name, algorithms in settings.items():
        seeds = sorted({run.seed for found in algorithms.values() for run in found})
        facts = next(iter(algorithms.values()))[0].facts()
        text += [f"{name}: {facts['data']}, {facts['dtype']}, seeds {seeds}", comparison.markdown(algorithms, family)]
    tried = [f"{own}: {', '.join(others)}" for own, others in family.items() if others]
    text += [f"Tried in addition to the defaults: {'; '.join(tried)}."] if tried else []
    (folder / "compare.md").write_text("\n\n".join(text) + "\n")
    print("\n" + "\n\n".join(text))
    report.write_csv(begun, folder / "compare.csv")
    drawn = comparison.figure(settings, family)
    drawn.savefig(folder / "compare.png", dpi=120)
    logger = AutoWandbLogger(name="compare", save_dir=str(folder), group="compare", job_type="report")
    log_figure([logger], "compare/figure", drawn, runs[0].rounds)
    wandb.finish()
    print(f"\nTable:  {folder / 'compare.md'}\nFigure: {folder / 'compare.png'}\nRounds: {folder / 'compare.csv'}")

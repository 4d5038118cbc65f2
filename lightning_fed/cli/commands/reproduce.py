"""``lightning-fed reproduce synthetic|femnist|all``: run the paper's experiments, and write figures and tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import wandb

from lightning_fed.cli.experiments import report
from lightning_fed.cli.experiments.drive import drive
from lightning_fed.cli.experiments.run import Execution, Recipe, Run
from lightning_fed.cli.experiments.settings import PAIR, femnist, parse_algorithm, synthetic
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.tracking import AutoWandbLogger, log_figure

#: Rounds and local steps with which a quick run visibly learns.
QUICK_ROUNDS, QUICK_STEPS = 15, 100


def main(args: list[str] | None = None) -> None:
    parser = _parser()
    asked = parser.parse_args(args)
    try:
        names = ("synthetic", "femnist") if asked.experiment == "all" else (asked.experiment,)
        experiments = {name: _runs(name, asked) for name in names}
        everything = [run for runs in experiments.values() for run in runs]
        for run in everything:
            run.check()
    except ValueError as error:
        parser.error(str(error))
    drive(everything)
    for name, runs in experiments.items():
        _report(name, runs)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "lightning-fed reproduce",
        description="Run FedADMM and FedDR with the paper's settings (10 of 30 clients, 300 SGD steps of batch 2, step"
        " size 0.01, eta = alpha = 1, start local) and the same seeds; write figures, a table with their largest"
        " difference by round, CSV and W&B. Repeat an interrupted command to resume it.",
    )
    parser.add_argument("experiment", choices=("synthetic", "femnist", "all"))
    parser.add_argument("--rounds", type=whole_number, help="number of rounds (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"try it: {QUICK_ROUNDS} rounds of {QUICK_STEPS} steps with one seed; on FEMNIST, a small perceptron",
    )
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME", help="baselines: FedAvg FedProx:mu=0.1 ...")
    parser.add_argument(
        "--data", type=Path, help="FEMNIST as LEAF JSON, npz by writer, parquet or NIST (default: generated)"
    )
    parser.add_argument("--sets", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="a = b of the synthetic sets")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="precision; in float32, two correct runs separate",
    )
    parser.add_argument(
        "--threads", type=whole_number, help="number of torch's threads (default: 1 on the synthetic sets)"
    )
    parser.add_argument("--workers", type=whole_number, default=1, help="processes that share the clients of a round")
    parser.add_argument(
        "--evaluate-every",
        type=whole_number,
        default=1,
        help="rounds between evaluations; the first three and the last are always evaluated",
    )
    parser.add_argument(
        "--keep-checkpoints", action="store_true", help="keep checkpoints, so that runs can be extended by more rounds"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    return parser


def whole_number(text: str) -> int:
    """A number of rounds, threads or processes, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _runs(name: str, asked: argparse.Namespace) -> list[Run]:
    """All runs of an experiment, ordered by seed, so that pairs of algorithms are complete early."""
    settings = [femnist(asked.data, small=asked.quick)] if name == "femnist" else [synthetic(s) for s in asked.sets]
    out: Path = asked.out / "quick" if asked.quick else asked.out
    recipe = Recipe(
        rounds=asked.rounds or (QUICK_ROUNDS if asked.quick else 100),
        local_steps=QUICK_STEPS if asked.quick else 300,
        dtype=asked.dtype,
        evaluate_every=asked.evaluate_every,
        evaluate_also=(1, 2, 3),
    )
    execution = Execution(workers=asked.workers, keep_checkpoint=asked.keep_checkpoints)
    return [
        Run(
            setting,
            label,
            PAIR[label] if label in PAIR else parse_algorithm(label),
            seed,
            out,
            recipe,
            replace(execution, threads=asked.threads or setting.threads),
        )
        for setting in settings
        for seed in (asked.seeds[:1] if asked.quick else asked.seeds)
        for label in (*PAIR, *asked.also)
    ]


def _report(name: str, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.diverged:
            print(f"\n{run.setting.name} {run.label} seed {run.seed} diverged: {run.diverged}")
    settings = report.grouped([run for run in runs if run.history() and not run.diverged])
    if not settings:
        return
    for algorithms in settings.values():
        facts = next(iter(algorithms.values()))[0].facts()
        print(f"\n{facts['data']}, {facts['dtype']}, seeds {sorted({run.seed for run in runs})}")
        print(report.table(algorithms))
        largest = report.largest_differences(algorithms)
        print("largest difference: " + ", ".join(f"{metric} {value:.1e}" for metric, value in largest.items()))
    folder = runs[0].out
    report.write_csv(runs, folder / f"{name}.csv")
    drawn = report.figure(settings)
    drawn.savefig(folder / f"{name}.png", dpi=120)
    logger = AutoWandbLogger(name=f"reproduce {name}", save_dir=str(folder), group="reproduce", job_type="report")
    log_figure([logger], f"reproduce/{name}", drawn, runs[0].rounds)
    wandb.finish()
    print(
        f"\nFigure: {folder / f'{name}.png'}\nTable:  {folder / f'{name}.csv'}\nW&B:    {folder}/wandb and in the runs"
    )

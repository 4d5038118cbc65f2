"""``lightning-fed tune --config FILE --search KEY=RANGE``: search hyper-parameters by successive halving."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from lightning_fed.callbacks.evaluation import OBJECTIVE
from lightning_fed.callbacks.optuna_pruning import import_optuna
from lightning_fed.cli.commands.reproduce import whole_number
from lightning_fed.cli.experiments.drive import quiet
from lightning_fed.cli.interruption import resumable
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.cli.tuning import report
from lightning_fed.cli.tuning.config import Config, read_config, resolve, try_config
from lightning_fed.cli.tuning.halving import Halving, ranking
from lightning_fed.cli.tuning.journal import Journal, Trial
from lightning_fed.cli.tuning.plan import DEFAULT, Budget, Objective, Plan, parse_bytes, rungs
from lightning_fed.cli.tuning.space import GRAMMAR, arguments, read_space
from lightning_fed.cli.tuning.study import StudyFile
from lightning_fed.cli.tuning.trial import Runner
from lightning_fed.data.validation_share import VAL_FRACTION
from lightning_fed.store import Lease
from lightning_fed.tracking import AutoWandbLogger, log_figure, log_table

USAGE = "lightning-fed tune --config FILE --search KEY=RANGE ... [--rounds N | --bytes 20MB] [options of fit]"
DESCRIPTION = f"""\
Search hyper-parameters with Optuna by successive halving: all trials go to the first rung, the best of them on to the
next, bit for bit as if they had not stopped. A range is {GRAMMAR}. Trials are compared by a metric of the validation or
training data, never of the test data; without a validation split clients hold out a share of their training data.
Repeat an interrupted command to resume it."""
EPILOG = """\
example:
  lightning-fed tune --config configs/synthetic_fedadmm.yaml --search federated.algorithm.eta=log:0.01:10 \\
    --search model.lr=choice:0.01,0.03 --trials 16 --rounds 40 --min-rounds 5"""


def main(args: list[str] | None = None) -> None:
    parser = _parser()
    asked, others = parser.parse_known_args(sys.argv[2:] if args is None else args)
    quiet()
    try:
        import_optuna("lightning-fed tune")
        space, objective = read_space(asked.space, asked.search), Objective(asked.objective, asked.maximize)
        if asked.rounds is not None:
            others = [*others, f"--trainer.max_epochs={asked.rounds}"]
        config = read_config(others)
        plan = Plan(
            resolve(space, config, others),
            asked.trials,
            asked.reduction,
            _budget(asked, config),
            objective,
            asked.sampler,
            asked.seed,
            asked.val_fraction,
        )
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    with Lease(asked.out):
        journal = Journal(asked.out)
        journal.begin({**plan.facts(), "config": config})
        _tune(plan, journal, others, asked.name or asked.out.resolve().name, config)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lightning-fed tune",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--search", action="append", default=[], metavar="KEY=RANGE", help="a config key and its values; repeatable")
    add("--space", type=Path, metavar="FILE", help="YAML file with lines `key: range`, beside or instead of --search")
    add("--trials", type=whole_number, default=16, help="number of trials (default: %(default)s)")
    add("--rounds", type=whole_number, help="budget of a trial (default: the config's trainer.max_epochs)")
    add("--min-rounds", type=whole_number, help="the first rung (default: rounds / reduction^3)")
    add("--bytes", type=_bytes, metavar="SIZE", help="budget of a trial in bytes received and sent, such as 20MB")
    add("--min-bytes", type=_bytes, metavar="SIZE", help="the first rung (default: bytes / reduction^3)")
    add("--reduction", type=_two_or_more, default=2, help="one of so many trials goes on (default: %(default)s)")
    add("--objective", default=DEFAULT, metavar="METRIC", help="metric to minimise (default: %(default)s)")
    add("--maximize", action="store_true", help="maximise the metric")
    add(
        "--val-fraction",
        type=float,
        default=VAL_FRACTION,
        metavar="SHARE",
        help="share of training data that clients hold out if there is no validation split (default: %(default)s)",
    )
    add("--sampler", choices=("tpe", "random"), default="tpe", help="Optuna's sampler (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the sampler; trials have the config's seed_everything")
    add("--name", help="name of the tune, and of its group in W&B (default: the name of the folder)")
    add("--out", type=Path, default=Path("runs/tune"), metavar="FOLDER", help="folder (default: %(default)s)")
    parser.add_argument_group("options of fit", "--config FILE, --data.init_args.NAME=VALUE and all others")
    return parser


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _two_or_more(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 2, got {text!r}")
    return int(text)


def _budget(asked: argparse.Namespace, config: Config) -> Budget:
    if asked.bytes is not None and (asked.rounds is not None or asked.min_rounds is not None):
        raise ValueError("Give the budget in --rounds or in --bytes, not in both; --trainer.max_epochs limits rounds.")
    if asked.bytes is None and asked.min_bytes is not None:
        raise ValueError("--min-bytes needs --bytes. With a budget in rounds give --min-rounds.")
    if asked.bytes is not None:
        return Budget("bytes", _levels("bytes", asked.bytes, asked.min_bytes, asked.reduction))
    rounds = config["trainer"]["max_epochs"]
    if rounds is None or rounds < 1:
        raise ValueError(f"There is no budget: the config's trainer.max_epochs is {rounds}. Give --rounds or --bytes.")
    return Budget("rounds", _levels("rounds", rounds, asked.min_rounds, asked.reduction))


def _levels(unit: str, most: int, least: int | None, reduction: int) -> tuple[int, ...]:
    if least is not None and least > most:
        raise ValueError(f"--min-{unit} must be at most the budget of {most} {unit}, got {least}.")
    return rungs(math.ceil(most / reduction**3) if least is None else least, most, reduction)


def _tune(plan: Plan, journal: Journal, args: Sequence[str], name: str, config: Config) -> None:
    with resumable():
        _warn_of_moving_objective(plan)
        print(plan.describe(), flush=True)
        study = StudyFile(plan, journal.folder / "optuna.log", name)
        runner = Runner(plan, args, journal, name)
        trials = Halving(plan, journal, study, runner.go).run()
        if not any(trial.alive for trial in trials):
            first = trials[0].last
            raise ValueError(f"No trial came to an end. Trial 0 {first.state}: {first.why}")
        _report(plan, journal, trials, args)
        if runner.told:
            print("        trains on all training data, the share that trials held out for validation included.")
        if (logger := config["trainer"]["logger"]) is not False:
            options = logger.get("init_args", {}) if isinstance(logger, dict) else {}
            _log(plan, journal.folder, trials, name, options.get("project", "lightning-fed"))


def _warn_of_moving_objective(plan: Plan) -> None:
    moving = [p.key for p in plan.space if {"g", "weights"} & set(p.key.split(".")) and p.key.startswith("federated.")]
    if plan.objective.name == OBJECTIVE and moving:
        print(f"Note: {moving[0]} changes {OBJECTIVE} itself. Compare by another metric, such as {DEFAULT}.")


def _report(plan: Plan, journal: Journal, trials: Sequence[Trial], args: Sequence[str]) -> None:
    folder, best = journal.folder, ranking(trials, plan)[0]
    own = read_config([*args, *arguments(best.settings)])
    report.write_csv(trials, plan, folder / "table.csv")
    first = _first_config(args)
    base = None if first is None else try_config(["--config", str(first)])
    (folder / "best.yaml").write_text(report.best_config(own, base, first, folder))
    report.figure(trials, plan, title(plan, own)).savefig(folder / "tune.png", dpi=120)
    print(f"\n{report.table(trials, plan)}\n")
    print(f"Table:  {folder / 'table.csv'}\nFigure: {folder / 'tune.png'}\nStudy:  {folder / 'optuna.log'}")
    print(f"Best:   lightning-fed fit --config {folder / 'best.yaml'}\n        {report.command(args, best)}")


def _first_config(args: Sequence[str]) -> Path | None:
    """The first value of ``--config``."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    return next((Path(value) for arg, value in itertools.pairwise(words) if arg == "--config"), None)


def title(plan: Plan, config: dict[str, Any]) -> str:
    """What was tuned, on which data, how."""
    algorithm, data = (config[a][b] for a, b in (("federated", "algorithm"), ("data", "class_path")))
    classes = algorithm["class_path"].rsplit(".", 1)[-1], data.rsplit(".", 1)[-1]
    return f"{classes[0]} on {classes[1]}: {plan.trials} trials, rungs at {plan.budget.names()}"


def _log(plan: Plan, folder: Path, trials: Sequence[Trial], name: str, project: str) -> None:
    """Log table and figure as one more run of the tune's group."""
    logger = AutoWandbLogger(project, str(folder), f"{name} summary", group=name, job_type="tune")
    last = max(trial.last.rounds for trial in trials)
    log_table([logger], "tune/table", report.columns(plan), report.rows(trials, plan), last)
    log_figure([logger], "tune/figure", report.figure(trials, plan, name), last)
    wandb.finish()

"""``lightning-fed advise --config configs/....yaml``: recommend an algorithm, its steps and the learning rate."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.cli.advising.report import Finding, as_json, as_text
from lightning_fed.cli.advising.settings import Settings, rate_key, write
from lightning_fed.cli.advising.survey import Measured, Surveyor
from lightning_fed.cli.main import FederatedCLI, build
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.lightning import ArgsType, LightningArgumentParser, pl
from lightning_fed.lightning.package import TRAINER
from lightning_fed.server import FederatedServer
from lightning_fed.theory.advice import Run, cautions, recommend
from lightning_fed.theory.guarantee import guarantee

USAGE = "lightning-fed advise --config FILE [options of fit] [--write FILE] [--json] [--no-trial] [...]"
DESCRIPTION = """\
Recommend an algorithm, its penalty or steps, and the learning rate for a run, each with its reason, and print the
command that runs them. Tries learning rates on the training data of a few clients, and measures the curvature of their
losses to say what FedADMM's theorem would ask for. Takes the config files and overrides of `lightning-fed fit`."""

#: Replaces the config's settings, so that nothing but the measurement runs.
QUIET: dict[str, Any] = {
    "logger": False,
    "callbacks": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "profiler": None,
    "min_epochs": None,
    "min_steps": None,
    "max_epochs": 1,
    "max_steps": -1,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}

#: Rounds of a Trainer that is given no limit.
DEFAULT_ROUNDS = 1000


class AdviseCLI(FederatedCLI):
    """Builds the objects of ``fit``, without loggers, callbacks and checkpoints; ``asked`` is the config as given."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.prog, parser.usage = "lightning-fed advise", USAGE
        super().add_core_arguments_to_parser(parser)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(pl.Trainer, "fit", skip=self.subcommands()["fit"])  # ckpt_path and the like

    def read_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # main gives a list

    def before_instantiate_classes(self) -> None:
        self.save_config_callback = None
        self.asked = self.config.clone()
        for name, value in QUIET.items():
            self.config.trainer[name] = value

    @property
    def rounds(self) -> float:
        """Number of rounds that the config asks for, inf if there is no limit."""
        trainer = self.asked.trainer
        epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
        if epochs is None and steps == -1:
            epochs = -1 if trainer.get("max_time") else DEFAULT_ROUNDS
        return min(math.inf if limit in (None, -1) else limit for limit in (epochs, steps))


def main(args: list[str] | None = None) -> None:
    """Measure, and print the recommendations."""
    parser = _parser()
    options, others = parser.parse_known_args(sys.argv[2:] if args is None else args)
    if options.write is not None and options.write.exists():
        parser.error(f"argument --write: {options.write} exists. Name a new file.")
    logging.getLogger(TRAINER).setLevel(logging.ERROR)
    cli = build(others, cli=AdviseCLI, run=False)
    assert isinstance(cli, AdviseCLI)
    others = _anew(others)
    surveyor = Surveyor(options.clients, options.steps, 0 if options.no_trial else options.trial_rounds, _tell)
    server = next(callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer))
    server.evaluate_every, server.figure = 0, False
    cli.trainer.callbacks.append(surveyor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the advice contains the warnings of fit
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert surveyor.measured is not None
    found = _found(cli, server, surveyor.measured, options, others)
    print(as_json(found) if options.json else as_text(found))
    if options.write is not None:
        resolved = yaml.safe_load(cli.parser.dump(cli.asked, skip_none=False))
        write(options.write, found.settings, others, {**resolved, "ckpt_path": None})
        _tell(f"Wrote {options.write}. To run it: lightning-fed fit --config {options.write}")


def _found(
    cli: AdviseCLI, server: FederatedServer, measured: Measured, options: argparse.Namespace, given: list[str]
) -> Finding:
    data = cli.datamodule
    lr, now = measured.advised_lr if measured.plain else None, server.algorithm
    examples = {cid: data.num_examples(cid) for cid in data.client_ids}
    tau = {name: own * measured.advised_lr / measured.lr for name, own in measured.tau.items()}
    run = Run(now, server.sampler, examples, cli.rounds, measured.local_steps, lr, tau)
    advice = recommend(run, options.mean, options.weights)
    settings = Settings(advice.algorithm, now, measured.advised_lr, rate_key(cli.asked, measured.lr))
    L, trial = measured.curvature.L, measured.trial
    planned = now.planned(measured.tau[now.weights]) if measured.plain else now
    own = measured.lr if measured.plain else None
    return Finding(
        run,
        measured,
        advice,
        settings,
        guarantee(measured.curvature),
        present=cautions(run, planned, own, measured.tau[now.weights], L, trial is not None and trial.learns_at_own),
        advised=cautions(
            run, advice.algorithm, lr, tau[advice.algorithm.weights], L, trial is not None and trial.conclusive
        ),
        command=settings.command(given),
    )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="lightning-fed advise", usage=USAGE, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a config that runs the recommendation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--mean",
        choices=("active", "seen", "all"),
        default="active",
        help="FedADMM's average: over the cohort (default), over the clients seen so far, or over all (the paper's)",
    )
    parser.add_argument(
        "--weights", choices=("uniform", "samples"), help="weights of the clients (default: those of the config)"
    )
    parser.add_argument("--no-trial", action="store_true", help="keep the learning rate, without trying others")
    parser.add_argument(
        "--trial-rounds", type=_whole, default=2, help="visits of each client for every learning rate (default: 2)"
    )
    parser.add_argument(
        "--clients", type=_whole, default=5, help="number of clients to measure, drawn by the seed (default: 5)"
    )
    parser.add_argument(
        "--steps", type=_natural, default=10, help="gradient steps to the second point of curvature (default: 10)"
    )
    parser.add_argument_group("options of fit", "--config FILE, --federated.algorithm.eta=VALUE and all others")
    return parser


def _anew(args: list[str]) -> list[str]:
    """Arguments without a checkpoint: another algorithm cannot resume from it."""
    after = ["", *args]
    named = "--ckpt_path"
    return [
        word
        for word, before in zip(args, after, strict=False)
        if before != named and word != named and not word.startswith(f"{named}=")
    ]


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

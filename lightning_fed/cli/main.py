"""``lightning-fed fit|validate|test|predict --config configs/....yaml``: LightningCLI with a ``federated:`` section.

:data:`COMMANDS` names the commands beside Lightning's own; :mod:`~lightning_fed.cli.bases` reads ``base: FILE``.
"""

from __future__ import annotations

import itertools
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import set_parsing_settings
from omegaconf.errors import OmegaConfBaseException

from lightning_fed._version import __version__
from lightning_fed.cli.bases import BaseParser
from lightning_fed.cli.holding_out import hold_out_where_needed
from lightning_fed.cli.interruption import resumable, resume_from, terminable
from lightning_fed.cli.refusals import check_checkpoint, one_line, refusal, refusal_of_value, unwrapped
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.lightning import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
    has_last_checkpoint,
    pl,
    rank_zero_info,
)
from lightning_fed.server import FederatedServer
from lightning_fed.trainer.checks import check_trainer


class LogConfig(SaveConfigCallback):
    """Gives the resolved config to the loggers, and writes it to the trainer's root folder.

    Lightning's own callback writes one file per log folder and aborts if it exists, as in a second run with W&B.
    """

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        config = yaml.safe_load(text)
        server = next(callback for callback in trainer.callbacks if isinstance(callback, FederatedServer))
        if stage == "fit":
            config["federated"] |= server.logged_settings(trainer)["federated"]
        for logger in trainer.loggers:
            logger.log_hyperparams(config)
        if stage == "fit" and not trainer.fast_dev_run:
            _keep(Path(trainer.default_root_dir), text)


def _keep(folder: Path, text: str) -> None:
    """Write ``config.yaml``; if another run has written one, ``config-v1.yaml`` and so on, as checkpoints do."""
    folder.mkdir(parents=True, exist_ok=True)
    names = itertools.chain(["config.yaml"], (f"config-v{i}.yaml" for i in itertools.count(1)))
    path = next(path for name in names if not (path := folder / name).exists() or path.read_text() == text)
    path.write_text(text)


class FederatedCLI(LightningCLI):
    """Builds any LightningModule, any FederatedDataModule, and a FederatedServer from ``federated:``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with resumable(lambda: resume_from(getattr(self, "trainer", None))):
            super().__init__(*args, **kwargs)

    def instantiate_classes(self) -> None:
        """Report a value that a class refuses as the parser reports a value that it refuses."""
        try:
            self.build_classes()
        except Exception as error:  # any class may refuse any value; an error that is no refusal is raised again
            cause = unwrapped(error)
            if refusal_of_value(cause) is None:
                raise cause from None
            self.parser.error(str(error), cause)

    def build_classes(self) -> None:
        """Build everything; refuse several devices before Lightning starts a process for each."""
        super().instantiate_classes()
        if self.subcommand in (None, "fit"):
            check_trainer(self.trainer)
            hold_out_where_needed(self.trainer)
        elif self.config[self.subcommand].ckpt_path is None:
            made = f"{self.subcommand} without --ckpt_path takes the model as its class makes it"
            rank_zero_info(f"{made}. For the weights of a fit give --ckpt_path=last, or a file.")
        elif self.config[self.subcommand].ckpt_path == "last" and not has_last_checkpoint(self.trainer):
            raise ValueError("ckpt_path: there is no last checkpoint where this config writes them. Give a file.")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Report a config that cannot be read as the parser reports a value that it refuses."""
        try:
            self.read_arguments(parser, args)
        except (OmegaConfBaseException, UnicodeDecodeError) as error:
            parser.error(f"The config cannot be read: {error}", error)
        try:  # now, because Lightning reads hyper-parameters from the checkpoint next
            check_checkpoint(self.config.get(self.config.get("subcommand"), self.config).get("ckpt_path"))
        except ValueError as error:
            parser.error(str(error), error)

    def read_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(FederatedServer, "federated")


#: Commands beside Lightning's own, with their help: ``lightning-fed NAME`` calls ``main`` of ``cli.commands.NAME``.
COMMANDS = {
    "advise": "recommend an algorithm, its steps and the learning rate, with reasons",
    "checkpoint": "inspect, verify or export checkpoints",
    "compare": "run all algorithms on the synthetic sets",
    "data": "survey the data of the clients",
    "deploy": "run a config on real clients, with Flower",
    "reproduce": "run the paper's experiments",
    "tune": "search hyper-parameters by successive halving",
}


def main(args: ArgsType = None, **kwargs: Any) -> FederatedCLI | None:
    """Run the command line; ``args`` replace ``sys.argv`` in tests and notebooks."""
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words:
        _check_command(str(words[0]))
    if isinstance(words, list) and words and words[0] in COMMANDS:
        import_module(f"lightning_fed.cli.commands.{words[0]}").main(words[1:])
        return None
    return build(args, **kwargs)


def _check_command(word: str) -> None:
    """Refuse a word that is no command, and name the nearest; Lightning's parser knows its own commands alone."""
    known = ["fit", "validate", "test", "predict", *COMMANDS]
    if word == "--version":
        print(f"lightning-fed {__version__}")
        raise SystemExit(0)
    if not word.startswith("-") and word not in known:
        near = get_close_matches(word, known, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        print(f"lightning-fed: error: There is no command {word}. {hint}There are {', '.join(known)}.", file=sys.stderr)
        raise SystemExit(2)


def build(args: ArgsType = None, cli: type[FederatedCLI] = FederatedCLI, **kwargs: Any) -> FederatedCLI:
    """Run Lightning's part of the command line, with the class ``cli``."""
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    more = "; ".join(f"lightning-fed {name}: {text}" for name, text in COMMANDS.items())
    return cli(
        pl.LightningModule,
        FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        parser_class=BaseParser,
        seed_everything_default=0,
        parser_kwargs={"parser_mode": "omegaconf+", "prog": "lightning-fed", "epilog": f"More commands: {more}."},
        save_config_callback=LogConfig,
        save_config_kwargs={"save_to_log_dir": False},
        args=args,
        **kwargs,
    )


def run() -> None:
    """Console script: imports the user's modules from the current folder, as ``python -m`` does.

    A refused setting is one line and exit code 2; Ctrl-C is exit code 130, SIGTERM 143; an error of another kind keeps
    its traceback.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with terminable(), resumable():
            main()
    except Exception as error:  # one that is no refusal of a setting is raised again
        message = refusal(error)
        if message is None:
            raise
        print(f"lightning-fed: error: {one_line(message)}", file=sys.stderr)
        raise SystemExit(2) from error

"""The config that trials share: read it, and find the keys of a search in it."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import yaml

from lightning_fed.cli.main import FederatedCLI, build
from lightning_fed.cli.refusals import one_line
from lightning_fed.cli.tuning.space import Parameter, arguments, as_text
from lightning_fed.lightning import ArgsType, LightningArgumentParser, pl

#: Keys that a tune sets itself.
OWN = ("ckpt_path", "seed_everything", "trainer.callbacks", "trainer.default_root_dir", "trainer.logger")
LIMITS = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time")

Config = dict[str, Any]


class ConfigCLI(FederatedCLI):
    """Reads the arguments of ``fit`` and builds nothing."""

    exits = False

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.prog, parser.exit_on_error = "lightning-fed tune", self.exits
        super().add_core_arguments_to_parser(parser)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(pl.Trainer, "fit", skip=self.subcommands()["fit"])  # ckpt_path and the like

    def read_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # always a list
        if isinstance(seed := self.config.seed_everything, bool):
            parser.error(f"seed_everything: trials must be repeatable. Give a whole number, not {seed}.")

    def build_classes(self) -> None:
        """Build nothing."""

    def plain(self) -> Config:
        """The resolved config in plain values."""
        content: Config = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        return content


class StrictConfigCLI(ConfigCLI):
    """Reports an error in the arguments and exits, as ``fit`` does."""

    exits = True


def read_config(args: Sequence[str]) -> Config:
    """The resolved config; exits on an error in it, and refuses what a tune cannot do."""
    cli = build(list(args), cli=StrictConfigCLI, run=False)
    assert isinstance(cli, ConfigCLI)
    config = cli.plain()
    if config.get("ckpt_path") is not None:
        raise ValueError("ckpt_path: trials start at round 0, and resume from their own checkpoints. Leave it out.")
    return config


def try_config(args: Sequence[str]) -> Config | None:
    """The resolved config; None if the arguments do not suffice for one."""
    try:
        cli = build(list(args), cli=ConfigCLI, run=False)
    except ArgumentError:
        return None
    assert isinstance(cli, ConfigCLI)
    return cli.plain()


def resolve(space: Sequence[Parameter], config: Config, args: Sequence[str]) -> tuple[Parameter, ...]:
    """The parameters with the full keys of the config, in an order in which none overrides another."""
    given = {full_key(config, parameter.key): parameter for parameter in space}
    if len(given) < len(space):
        keys = [full_key(config, parameter.key) for parameter in space]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is searched twice. Give it once.")
    for key, parameter in given.items():
        _check_ownership(key, parameter.key)
    ordered = sorted(given, key=lambda key: sum(key.startswith(f"{other}.") for other in given))
    found = tuple(Parameter(key, given[key].kind, given[key].values) for key in ordered)
    if not _accepts_together(found, args):
        for parameter in found:
            _check_values(parameter, given[parameter.key].key, config, args)
    return found


def _check_ownership(key: str, given: str) -> None:
    for own in (*OWN, *LIMITS):
        if key == own or key.startswith(f"{own}."):
            instead = "Use --rounds or --bytes" if own in LIMITS else "Leave it out"
            raise ValueError(f"{given} cannot be searched: tune sets {own} itself. {instead}.")


def _accepts_together(space: Sequence[Parameter], args: Sequence[str]) -> bool:
    """Whether the parser takes every value of every parameter, several at a time, because parsing is slow."""
    for i in range(max(len(parameter.values) for parameter in space)):
        chosen = {parameter.key: parameter.values[min(i, len(parameter.values) - 1)] for parameter in space}
        try:
            build([*args, *arguments(chosen)], cli=ConfigCLI, run=False)
        except ArgumentError:
            return False
    return True


def _check_values(parameter: Parameter, given: str, config: Config, args: Sequence[str]) -> None:
    """Refuse a key that the config does not have, and values of another type."""
    for value in parameter.values:
        try:
            build([*args, *arguments({parameter.key: value})], cli=ConfigCLI, run=False)
        except ArgumentError as error:
            if not has(config, parameter.key):
                raise ValueError(_unknown(given, config)) from None
            raise ValueError(f"{given}={as_text(value)}: {one_line(str(error))}") from error


def full_key(config: Config, key: str) -> str:
    """The key with ``init_args`` wherever an object's arguments begin.

    >>> full_key({"model": {"class_path": "MLP", "init_args": {"lr": 0.1}}}, "model.lr")
    'model.init_args.lr'
    """
    found, here = [], config
    for part in key.split("."):
        if isinstance(here, dict) and "class_path" in here and part not in ("class_path", "init_args", "dict_kwargs"):
            found.append("init_args")
            here = here.get("init_args") or {}
        found.append(part)
        here = here.get(part) if isinstance(here, dict) else None  # type: ignore[assignment]
    return ".".join(found)


def has(config: Config, key: str) -> bool:
    """Whether the config has a key."""
    here: Any = config
    for part in key.split("."):
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
    return True


def _unknown(given: str, config: Config) -> str:
    names = [key if ".init_args." in given else key.replace(".init_args.", ".") for key in flat(config)]
    names = [name for name in names if not name.endswith("class_path")]
    near = get_close_matches(given, names, n=3) or [
        name for name in names if name.split(".")[-1] == given.split(".")[-1]
    ]
    hint = f"The nearest are {', '.join(near)}" if near else "Print all: lightning-fed fit --config FILE --print_config"
    return f"The config has no key {given}. {hint}."


def flat(config: Config) -> dict[str, Any]:
    """Values by dotted key.

    >>> flat({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= {f"{name}.{k}": v for k, v in flat(value).items()} if isinstance(value, dict) else {name: value}
    return found

"""The search space: config keys, each with a range or choices."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.callbacks.optuna_pruning import import_optuna

Value = bool | int | float | str | None

GRAMMAR = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, logint:LOW:HIGH or choice:A,B,..."


@dataclass(frozen=True)
class Parameter:
    """A config key and the values to search.

    Args:
        key: dotted key of the config.
        kind: ``log``, ``uniform``, ``int``, ``logint`` or ``choice``.
        values: lowest and highest value, or all choices; a choice that is a list or a mapping is JSON.
    """

    key: str
    kind: str
    values: tuple[Value, ...]

    @property
    def spec(self) -> str:
        """The range or the choices as text."""
        texts = [as_text(value) for value in self.values]
        return f"choice:{','.join(texts)}" if self.kind == "choice" else ":".join([self.kind, *texts])

    def distribution(self) -> Any:
        """The Optuna distribution."""
        distributions = import_optuna("lightning-fed tune").distributions
        if self.kind == "choice":
            return distributions.CategoricalDistribution(self.values)
        kind = distributions.IntDistribution if "int" in self.kind else distributions.FloatDistribution
        return kind(*self.values, log="log" in self.kind)


def parse_parameter(key: str, spec: object) -> Parameter:
    """Read a range or choices; a list is choices.

    >>> parse_parameter("model.lr", "log:0.01:1")
    Parameter(key='model.lr', kind='log', values=(0.01, 1.0))
    >>> parse_parameter("model.sizes", "choice:[60,10],[60,32,10]").values
    ('[60, 10]', '[60, 32, 10]')
    """
    if isinstance(spec, list):
        return Parameter(key, "choice", _choices(key, spec))
    kind, _, rest = str(spec).partition(":")
    if kind == "choice":
        try:
            return Parameter(key, kind, _choices(key, yaml.safe_load(f"[{rest}]")))
        except yaml.YAMLError as error:
            raise ValueError(f"{key}: choices are values with commas between them, got {rest!r}.") from error
    if kind not in ("log", "uniform", "int", "logint"):
        raise ValueError(f"{key}: {spec!r} is no range. Give {GRAMMAR}.")
    return Parameter(key, kind, _range(key, kind, rest))


def _range(key: str, kind: str, text: str) -> tuple[Value, ...]:
    number: Any = int if "int" in kind else float
    what = "whole numbers" if "int" in kind else "numbers"
    try:
        low, high = map(number, text.split(":"))
    except ValueError as error:
        raise ValueError(f"{key}: {kind} needs two {what}, {kind}:LOW:HIGH, got {kind}:{text}.") from error
    if not low < high or not math.isfinite(low) or not math.isfinite(high):
        raise ValueError(f"{key}: {kind} needs LOW < HIGH, both finite, got {low} and {high}.")
    if "log" in kind and low <= 0:
        raise ValueError(f"{key}: the lowest value of a log scale must be positive, got {low}.")
    return (low, high)


def _choices(key: str, values: list[Any]) -> tuple[Value, ...]:
    plain = [json.dumps(value) if isinstance(value, (dict, list)) else value for value in values]
    repeated = [text for text, n in Counter(map(as_text, plain)).items() if n > 1]
    if len(plain) < 2 or repeated:
        got = f"{repeated[0]} twice" if repeated else f"{len(plain)}"
        raise ValueError(f"{key}: give two or more choices that differ, got {got}.")
    return tuple(plain)


def as_text(value: Value) -> str:
    """A value as the command line takes it.

    >>> as_text(0.1), as_text(None), as_text("FedAvg")
    ('0.1', 'null', 'FedAvg')
    """
    return value if isinstance(value, str) else json.dumps(value)


def arguments(settings: dict[str, Value]) -> list[str]:
    """Settings as arguments of ``fit``."""
    return [f"--{key}={as_text(value)}" for key, value in settings.items()]


def read_space(path: Path | None, searches: list[str]) -> list[Parameter]:
    """The parameters of a YAML file, ``key: range``, and those of the command line, ``key=range``."""
    pairs: list[tuple[str, object]] = [] if path is None else list(_file(path).items())
    for text in searches:
        key, equals, spec = text.partition("=")
        if not equals:
            raise ValueError(f"--search takes KEY=RANGE, got {text!r}. A range is {GRAMMAR}.")
        pairs.append((key.removeprefix("--"), spec))
    if not pairs:
        raise ValueError("There is nothing to search. Give --search KEY=RANGE, or --space FILE.")
    return [parse_parameter(key, spec) for key, spec in pairs]


def _file(path: Path) -> dict[str, object]:
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--space {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or any(isinstance(spec, dict) for spec in found.values()):
        raise ValueError(f"--space {path} must map dotted keys to ranges, such as `model.lr: log:0.001:0.1`.")
    return {str(key): spec for key, spec in found.items()}


def labels(keys: list[str]) -> dict[str, str]:
    """Short names of keys: the last part, or as many as it takes to tell them apart.

    >>> labels(["model.init_args.lr", "federated.algorithm.init_args.eta", "a.lr"])
    {'model.init_args.lr': 'model.lr', 'federated.algorithm.init_args.eta': 'eta', 'a.lr': 'a.lr'}
    """
    parts = {key: [part for part in key.split(".") if part != "init_args"] for key in keys}
    depth = dict.fromkeys(keys, 1)
    while True:
        found = {key: ".".join(parts[key][-depth[key] :]) for key in keys}
        many = Counter(found.values())
        longer = [key for key in keys if many[found[key]] > 1 and depth[key] < len(parts[key])]
        if not longer:
            return found
        for key in longer:
            depth[key] += 1

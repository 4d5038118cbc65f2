"""Name recommended settings by the keys of the command line: as a command, and as a config file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from lightning_fed.algorithms.compressed import Compressed
from lightning_fed.core.algorithm import Algorithm
from lightning_fed.prox import Zero

#: Where a config may hold the learning rate.
RATES = ("model.init_args.lr", "model.init_args.learning_rate", "optimizer.init_args.lr", "optimizer.lr")

#: Key of the algorithm, and of the one whose messages are compressed.
OUTER, INNER = "federated.algorithm", "federated.algorithm.init_args.algorithm"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Recommended settings.

    Args:
        algorithm: the recommended algorithm.
        now: the algorithm of the present run; compression of its messages is kept.
        lr: the recommended learning rate.
        lr_key: its key in a config; None if the config does not have it.
    """

    algorithm: Algorithm[Any, Any, Any]
    now: Algorithm[Any, Any, Any]
    lr: float
    lr_key: str | None

    @property
    def key(self) -> str:
        """Key of the recommended algorithm in a config."""
        inside = isinstance(self.now, Compressed) and not isinstance(self.algorithm, Compressed)
        return INNER if inside else OUTER

    @property
    def replaced(self) -> Algorithm[Any, Any, Any]:
        """The present algorithm that has the recommended one's key."""
        return self.now.algorithm if isinstance(self.now, Compressed) and self.key == INNER else self.now

    def command(self, given: Sequence[str]) -> list[str]:
        """The command that runs the recommendation; ``given`` are the arguments of the present run."""
        words = [f"--{key}={_word(value)}" for key, value in self._changes().items()]
        return ["lightning-fed", "fit", *given, *words]

    def _changes(self) -> dict[str, Any]:
        """Values by key; a command that changes a class keeps settings of the same name, so that these are named."""
        own, old = described(self.algorithm), described(self.replaced)
        found: dict[str, Any] = {} if self.lr_key is None else {self.lr_key: self.lr}
        if self.key == INNER:
            return {**found, INNER: own}  # a command cannot name parts of what is so deep
        before = old["init_args"]
        if own["class_path"] != old["class_path"]:
            found[OUTER] = own["class_path"].removeprefix("lightning_fed.algorithms.")
            shared: dict[str, Any] = dict.fromkeys(before)
            before = {**described(type(self.algorithm)())["init_args"], **shared}
        changed = {name: value for name, value in own["init_args"].items() if before.get(name) != value}
        return {**found, **{f"{OUTER}.{name}": value for name, value in changed.items()}}

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The config ``base``, or ``base: FILE``, with the settings in it."""
        found: dict[str, Any] = _copied(base)
        _put(found, self.key, described(self.algorithm))
        if self.lr_key is not None:
            _put(found, self.lr_key, self.lr)
        return found


def rate_key(config: Any, lr: float) -> str | None:
    """Key of the learning rate in a config: one of the usual names whose value is that of the optimisers."""
    for key in RATES:
        try:
            if float(config[key]) == lr:
                return key
        except (KeyError, TypeError, ValueError):
            continue
    return None


def described(owner: object) -> dict[str, Any]:
    """An algorithm or a prox as ``class_path`` and all its ``init_args`` but a ``g`` that is zero.

    >>> from lightning_fed.algorithms import FedProx
    >>> described(FedProx(mu=0.5))["init_args"]
    {'server_lr': 1.0, 'weights': 'samples', 'stragglers': 0.0, 'mu': 0.5}
    """
    kind = type(owner)
    package = kind.__module__.split(".")
    short = ".".join(package[:2]) if package[0] == "lightning_fed" else kind.__module__  # as the package exports it
    args = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}  # type: ignore[arg-type]
    given = {name: _plain(value) for name, value in args.items() if not isinstance(value, Zero)}
    return {"class_path": f"{short}.{kind.__qualname__}", "init_args": given}


def write(path: Path, settings: Settings, given: Sequence[str], resolved: Mapping[str, Any]) -> None:
    """Write a config that runs the recommendation: on top of the one config file ``given``, or with all settings."""
    file = _only_config(given)
    base = dict(resolved) if file is None else {"base": os.path.relpath(file, path.parent)}
    config = settings.config(base)
    _put(config, "trainer.default_root_dir", f"runs/{path.stem}")  # or it would overwrite the config's own checkpoints
    path.write_text("# Written by lightning-fed advise.\n" + yaml.safe_dump(config, sort_keys=False))


def _only_config(given: Sequence[str]) -> Path | None:
    """The config file, if it is all that a command gives."""
    words = list(given)
    if len(words) == 2 and words[0] in ("--config", "-c"):
        return Path(words[1])
    if len(words) == 1 and words[0].startswith(("--config=", "-c=")):
        return Path(words[0].split("=", 1)[1])
    return None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return described(value)
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value) if not isinstance(value, dict | list) else yaml.safe_dump(value, default_flow_style=True).strip()


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        config = config.setdefault(name, {})
    config[last] = value


def _copied(value: Any) -> Any:
    return {key: _copied(own) for key, own in value.items()} if isinstance(value, Mapping) else value

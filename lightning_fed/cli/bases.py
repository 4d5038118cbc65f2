"""Configs that build on another config: ``base: FILE`` at the top of a YAML file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_fed.cli.refusals import one_line
from lightning_fed.lightning import LightningArgumentParser
from lightning_fed.lightning.mixtures import mixture_in
from lightning_fed.lightning.package import in_this_package


class BaseParser(LightningArgumentParser):
    """Reads ``base: FILE``, a path relative to the file that names it, before the rest of that file.

    Reports an error in one line, without the usage, which has more than sixty.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)
        prog = (getattr(ex, "subcommand_parser", None) or self).prog.replace(" [options]", "")
        self.exit(2, f"{prog}: error: {one_line(mixture_in(message) or message)}\n")

    def parse_string(self, content: str, path: str | Path = "", **kwargs: Any) -> Any:
        """Parse a config with its bases; the parser has changed to the config's folder, so that paths are relative.

        Class paths of Lightning mean the package that is used, whichever of the two they name.
        """
        own = _loaded(content)
        if not content.strip():
            self.error(f"The config {path} is empty.")
        if "base" in own:
            try:
                content = yaml.safe_dump(with_bases(own, Path(path)), sort_keys=False)
            except (TypeError, ValueError) as error:
                self.error(str(error), error)
        return super().parse_string(in_this_package(content), path, **kwargs)

    def parse_args(self, args: Any = None, *others: Any, **kwargs: Any) -> Any:
        """Parse the command line, where too class paths of Lightning mean the package that is used."""
        words = [in_this_package(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_args(words, *others, **kwargs)


def with_bases(own: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config at ``path`` on top of its base, which may have a base of its own."""
    seen = [path.resolve()]
    while "base" in own:
        name = own.pop("base")
        if not isinstance(name, str):
            raise TypeError(f"{path}: base must be the path of a YAML file, got {name!r}.")
        path = path.parent / name
        if path.resolve() in seen:
            raise ValueError(f"{path}: this config is its own base. Remove one `base:`.")
        if not path.is_file():
            raise ValueError(f"base {name!r} of {seen[-1]} does not exist. Paths are relative to that file.")
        seen.append(path.resolve())
        own = merged(_loaded(path.read_text()), own)
    return own


def merged(base: Any, own: Any) -> Any:
    """``own`` on top of ``base``, key by key; another ``class_path`` replaces the object of the base as a whole.

    >>> merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}})
    {'a': 1, 'b': {'c': 4, 'd': 3}}
    >>> merged({"class_path": "FedADMM", "init_args": {"eta": 2}}, {"class_path": "FedAvg"})
    {'class_path': 'FedAvg'}
    """
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    if "class_path" in base and own.get("class_path", base["class_path"]) != base["class_path"]:
        return own
    return {**base, **{key: merged(base.get(key), value) for key, value in own.items()}}


def _loaded(content: str) -> dict[str, Any]:
    """A YAML mapping with its interpolations unresolved; empty if it is no mapping, which the parser reports."""
    try:
        found = OmegaConf.to_container(OmegaConf.create(content))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return {}
    return found if isinstance(found, dict) else {}  # type: ignore[return-value]

"""Refuse a mixture of Lightning's two packages, with the import to change."""

from __future__ import annotations

import re
import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from typing import Any

from lightning_fed.lightning.package import OTHER, PACKAGE, PARTS, REASON, TRAINER, VARIABLE


def package_of(kind: type) -> str | None:
    """Which of the two packages a class is defined in; None if in neither.

    >>> package_of(dict) is None
    True
    """
    root = kind.__module__.partition(".")[0]
    return {"lightning_fabric": "pytorch_lightning"}.get(root, root if root in PARTS else None)


def foreign_base(kind: type) -> type | None:
    """The class of the other package that a class is or derives from; None if it is of this package."""
    origins = {package_of(base): base for base in reversed(kind.__mro__)}
    return None if PACKAGE in origins else origins.get(OTHER)


def check_origin(value: object, role: str) -> None:
    """Refuse an object of the other package by ``role`` and name, with the import to change."""
    if message := mixture_of(type(value), role):
        raise TypeError(message)


def mixture_of(kind: type, role: str) -> str | None:
    """What is wrong with a class of the other package, and the import to change; None if it is of this package."""
    base = foreign_base(kind)
    if base is None:
        return None
    name = "" if kind.__name__ == role else f" {kind.__name__}"
    derived = "" if kind is base else f" (which derives from {base.__name__})"
    return _mixture(f"{role}{name}{derived}", base)


def mixture_in(message: str) -> str | None:
    """What is wrong with a class of the other package that a command's parser has refused as of a wrong kind."""
    if "does not correspond to a subclass" not in message:
        return None
    for path in re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", message):
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)  # the parser has imported it
        if isinstance(kind, type) and (found := mixture_of(kind, "class")):
            return found
    return None


def check_mixture(value: object) -> None:
    """Refuse what a Trainer does not know: if ``value`` is of this package, the Trainer is of the other."""
    check_origin(value, "object")
    if _is_ours(type(value)):
        raise TypeError(_given("Trainer", type(value), "Trainer"))


def _is_ours(kind: type) -> bool:
    return any(package_of(base) == PACKAGE for base in kind.__mro__)


def _given(role: str, kind: type, name: str, section: str = "") -> str:
    theirs = sys.modules[PARTS[OTHER][0] + section]
    return _mixture(f"{role} that was given {kind.__name__}", getattr(theirs, name))


def watch_mixtures() -> None:
    """Have both packages, as far as they are imported, name mixtures with the import to change.

    Lightning has a check of its own for this, which it calls where a Trainer is about to fail. It does not see classes
    that derive from those of the other package, and ends in "Expected a parent"; its command line has no check.
    """
    for package, (trainer, _) in PARTS.items():
        for name in _CHECKED:
            if (module := sys.modules.get(f"{trainer}.{name}")) is not None:
                module._check_mixed_imports = check_mixture  # type: ignore[attr-defined]
        parser = getattr(sys.modules.get(f"{trainer}.cli"), "LightningArgumentParser", None)
        if parser is not None and not hasattr(parser.add_lightning_class_args, "__wrapped__"):
            parser.add_lightning_class_args = _checking_classes(parser.add_lightning_class_args, package)


#: Modules of the Trainer's part that call Lightning's own check.
_CHECKED = ("utilities.model_helpers", "utilities.compile")
_WATCHED = {f"{trainer}.{name}" for trainer, _ in PARTS.values() for name in (*_CHECKED, "cli")}


def _checking_classes(add: Any, package: str) -> Any:
    """The method by which a command line of a package learns of a class, which must be of the same package."""

    @wraps(add)
    def checking(parser: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kind, type) and package == PACKAGE and (message := mixture_of(kind, "class")):
            raise TypeError(message)
        if isinstance(kind, type) and package == OTHER and _is_ours(kind):
            raise TypeError(_given("command line", kind, "LightningCLI", ".cli"))
        return add(parser, kind, *args, **kwargs)

    return checking


class _Late(MetaPathFinder):
    """Has mixtures watched in modules that are imported after lightning_fed, as in a later cell of a notebook."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if not isinstance(finder, _Late))
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                watch_mixtures()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch_late_imports() -> None:
    """Watch mixtures now, and again when a module that is watched is imported."""
    watch_mixtures()
    if not any(isinstance(finder, _Late) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Late())


def _mixture(what: str, base: type) -> str:
    theirs = PARTS[OTHER][0]
    return (
        f"The {what} is of {theirs}, but lightning_fed works with {TRAINER} here ({REASON})."
        f" Change the import to: {_public(base)}. Or use {theirs} everywhere, and set the environment variable"
        f" {VARIABLE}={OTHER}."
    )


def _public(base: type) -> str:
    """The import of the class of the same name in the package that is used."""
    section = base.__module__.removeprefix(PARTS[OTHER][0]).strip(".").partition(".")[0]
    where = TRAINER if hasattr(sys.modules.get(TRAINER), base.__name__) else f"{TRAINER}.{section}"
    return f"from {where} import {base.__name__}"

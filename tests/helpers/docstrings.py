"""Public names and what is written about them: the rules of CONTRIBUTING.md on docstrings, as functions."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import NamedTuple


class Public(NamedTuple):
    """A public name: where it is exported, its value and what is written about it."""

    path: str
    value: object
    doc: str

    @property
    def is_constant(self) -> bool:
        return not (_is_class(self.value) or inspect.isroutine(self.value))


def public_names(module: str) -> list[Public]:
    """The names of ``__all__``, or else those that the module defines, each with its documentation."""
    found = import_module(module)
    names = getattr(found, "__all__", None) or [name for name in vars(found) if _is_own(found, name)]
    return [Public(f"{module}.{name}", getattr(found, name), _documentation(found, name)) for name in names]


def _is_own(module: ModuleType, name: str) -> bool:
    return not name.startswith("_") and getattr(getattr(module, name), "__module__", None) == module.__name__


def _is_class(value: object) -> bool:
    """Whether it is a class, and no alias such as ``Callable[[Tensor], Tensor]``, which Python 3.10 takes for one."""
    return inspect.isclass(value) and not isinstance(value, GenericAlias)


def _documentation(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if not (_is_class(value) or inspect.isroutine(value)):
        return _attribute_docs(_origin(module, name)).get(name, "")
    doc = inspect.cleandoc(value.__dict__.get("__doc__") or "" if _is_class(value) else value.__doc__ or "")
    generated = dataclasses.is_dataclass(value) and doc.startswith(f"{name}(")
    return "" if generated else doc


def _origin(module: ModuleType, name: str) -> str:
    """The file of the module from which ``module`` imports the constant, as its own source says."""
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _origin(import_module(str(node.module)), name)
    return str(module.__file__)


@cache
def _attribute_docs(path: str) -> dict[str, str]:
    """Strings that follow an assignment at the top of a file: what Sphinx shows for a constant."""
    body = ast.parse(Path(path).read_text()).body
    pairs = pairwise(body)
    return {
        target.id: inspect.cleandoc(after.value.value)
        for assignment, after in pairs
        if isinstance(assignment, ast.Assign | ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
        for target in (assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target])
        if isinstance(target, ast.Name)
    }


def methods(name: Public) -> Iterator[Public]:
    """Public methods and properties that a public class defines; an override may inherit its documentation."""
    if not _is_class(name.value):
        return
    fields = getattr(name.value, "_fields", ())
    for attribute, value in vars(name.value).items():
        wrapped = isinstance(value, property | classmethod | staticmethod) or hasattr(value, "func")
        if attribute.startswith("_") or attribute in fields or not (wrapped or inspect.isfunction(value)):
            continue
        doc = inspect.getdoc(getattr(name.value, attribute, value)) or inspect.getdoc(value) or ""
        yield Public(f"{name.path}.{attribute}", value, doc)


def written(name: Public) -> list[Public]:
    """A name and its methods, with what is written at the place itself, not inherited from a class of others."""
    owns = [(method, getattr(method.value, "__func__", method.value).__doc__ or "") for method in methods(name)]
    return [name, *(method._replace(doc=inspect.cleandoc(doc)) for method, doc in owns)]


def has_example(name: Public) -> bool:
    """Whether a doctest stands in the documentation of a name, or of a method that its class defines."""
    return any(">>> " in place.doc for place in written(name))


def as_rest(doc: str) -> str:
    """Sections of arguments as fields, which is how Sphinx reads them."""
    lines, inside = [], False
    for line in doc.splitlines():
        if not inside and re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            inside, line = True, ""
        inside = inside and (not line or line.startswith("    "))
        lines.append(re.sub(r"^([*\w, ]+): ", _as_field, line[4:]) if inside else line)
    return "\n".join(lines)


def _as_field(argument: re.Match[str]) -> str:
    return f":param {argument[1].replace('*', chr(92) + '*')}: "

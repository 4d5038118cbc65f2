"""Choose parameters by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def check_patterns(owner: object, on: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Validate ``on`` and return it hashable: None for all parameters, a pattern, or a tuple of patterns."""
    if on is None or (isinstance(on, str) and on):
        return on
    if isinstance(on, (list, tuple)) and on and all(isinstance(pattern, str) and pattern for pattern in on):
        return tuple(on)
    raise ValueError(
        f'{type(owner).__name__}.on must be a pattern of names such as "*.weight", a list of them, or None for all'
        f" parameters; got {on!r}."
    )


def matching(owner: object, on: str | Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match a pattern of ``on`` and no pattern after ``!``; raise if a pattern matches no name.

    >>> matching(None, ["*.weight", "!norm.*"], ["conv.weight", "conv.bias", "norm.weight"])
    ('conv.weight',)
    """
    patterns = [on] if isinstance(on, str) else list(on)
    for pattern in patterns:
        if not any(is_match(name, pattern.removeprefix("!")) for name in names):
            raise ValueError(_no_match(owner, f"{pattern!r} matches none of", names))
    chosen = tuple(name for name in names if is_chosen(name, patterns))
    if not chosen:
        raise ValueError(_no_match(owner, f"{on!r} leaves none of", names))
    return chosen


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns, and none after ``!``; if all are after ``!``, the others match.

    >>> [is_chosen(name, ["*.weight", "!norm.*"]) for name in ("conv.weight", "conv.bias", "norm.weight")]
    [True, False, False]
    """
    no = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    yes = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    return any(is_match(name, pattern) for pattern in yes) and not any(is_match(name, pattern) for pattern in no)


def is_match(name: str, pattern: str) -> bool:
    """Whether a whole name matches one pattern."""
    return fnmatchcase(name, pattern)


def _no_match(owner: object, what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
    return f"{type(owner).__name__}.on={what} the module's trainable parameters. They are: {shown}."

"""Refuse wrong arguments, each kind in one place: messages name the class, the argument, the value and the remedy."""

from __future__ import annotations

from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value where a number is wanted, as messages show it: of text they say that it is text.

    >>> shown(-1.0), shown("1")
    ('-1.0', "'1', which is text: give a number, without quotes")
    """
    return f"{value!r}, which is text: give a number, without quotes" if isinstance(value, str) else repr(value)


def one_of(owner: object, name: str, choices: tuple[str | bool, ...]) -> None:
    """Refuse an attribute that is not one of ``choices``."""
    value = getattr(owner, name)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{type(owner).__name__}.{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")


def positive(owner: object, name: str, hint: str, *, zero: bool = False, upper: float = float("inf")) -> None:
    """Refuse an attribute that is not a finite number in ``(0, upper]`` (``[0, upper]`` with ``zero``)."""
    value = getattr(owner, name)
    if not is_number(value) or not (value >= 0 if zero else value > 0) or value == float("inf") or value > upper:
        wanted = "non-negative" if zero else "positive"
        limit = "" if upper == float("inf") else f" and at most {upper:g}"
        raise ValueError(f"{type(owner).__name__}.{name} must be {wanted}{limit}, got {shown(value)}. {hint}")


def below_one(owner: object, name: str, hint: str) -> None:
    """Refuse an attribute that is not a number in ``[0, 1)``."""
    value = getattr(owner, name)
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{type(owner).__name__}.{name} must be non-negative and below 1, got {shown(value)}. {hint}")


def whole(owner: object, name: str, minimum: int | None = None, *, optional: bool = False) -> None:
    """Refuse an attribute that is not a whole number, or is below ``minimum``; ``optional`` allows None."""
    value = getattr(owner, name)
    if value is None and optional:
        return
    if not is_whole(value) or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" >= {minimum}"
        raise ValueError(f"{type(owner).__name__}.{name} must be a whole number{bound}, got {shown(value)}.")

"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which `make quick` tries the first alone."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]

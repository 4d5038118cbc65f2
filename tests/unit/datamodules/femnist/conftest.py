"""Tests of what is read, converted and kept have a cache of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_shared_cache(own_cache: Path) -> None:
    pass

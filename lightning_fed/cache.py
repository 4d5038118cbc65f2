"""Where files are kept for later runs."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """``$LIGHTNING_FED_CACHE``, or ``lightning_fed`` in the user's cache folder."""
    if own := os.environ.get("LIGHTNING_FED_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fed"

"""Examples in docstrings import `pytorch_lightning`, as tests do, also when they are run without the tests."""

import os

os.environ.setdefault("LIGHTNING_FED_PACKAGE", "pytorch_lightning")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "agg")

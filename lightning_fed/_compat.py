"""Every private name of Lightning that we use, and the version guard.

A contract test (tests/integration/test_compat.py) checks each of them; nothing else may import ``pytorch_lightning``'s
underscored names.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning_fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning_fabric.utilities.warnings import PossibleUserWarning
from packaging.version import Version
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.trainer.call import (
    _call_callback_hooks as call_callback_hooks,
)
from pytorch_lightning.trainer.call import (
    _call_lightning_module_hook as call_module_hook,
)
from pytorch_lightning.trainer.call import (
    _call_strategy_hook as call_strategy_hook,
)
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.data import extract_batch_size
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "SUPPORTED",
    "CombinedLoader",
    "PossibleUserWarning",
    "SIGTERMException",
    "_FitLoop",
    "_Loop",
    "_ResultCollection",
    "_TrainingEpochLoop",
    "batch_size_of",
    "call_callback_hooks",
    "call_module_hook",
    "call_strategy_hook",
    "check_lightning_version",
    "collect_rng_states",
    "is_overridden",
    "is_param_in_hook_signature",
    "set_rng_states",
]

warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`")  # Lightning and torch about each other

SUPPORTED = (Version("2.6.6"), Version("2.7"))


def check_lightning_version(version: str = pl.__version__) -> None:
    """Refuse a Lightning whose private loops we have not been tested with."""
    low, high = SUPPORTED
    if not low <= Version(version) < high:
        raise ImportError(
            f"lightning_fed builds on Lightning's loops: it needs pytorch-lightning >={low},<{high}, found {version}."
            f' Run: pip install "pytorch-lightning>={low},<{high}"'
        )


def batch_size_of(batch: Any) -> int:
    """Number of samples in a batch; 1 where it has no size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return int(extract_batch_size(batch))
        except Exception:
            return 1

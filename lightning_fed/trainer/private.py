"""Every private name of Lightning that we use, and the version guard.

A contract test (tests/integration/test_compat.py) checks each of them; nothing else may import ``pytorch_lightning``'s
underscored names.
"""

from __future__ import annotations

import warnings
from functools import cache
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
from pytorch_lightning.utilities.data import _extract_batch_size as extract_batch_sizes
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
    """Guess the number of samples of a batch from a loader of the user's own, by its first tensor, as Lightning does.

    Where it cannot be seen, or tensors disagree, a warning says so once; without tensors a batch counts as one sample.
    """
    sizes = _sizes_in(batch)
    if len(set(sizes)) != 1:
        _warn_of_guess(type(batch).__name__, tuple(dict.fromkeys(sizes)))
    return sizes[0] if sizes else 1


def _sizes_in(batch: Any) -> list[int]:
    try:
        return [size for size in extract_batch_sizes(batch) if size is not None]
    except Exception:  # a batch may be any object, and fail in any way when it is looked into
        return []


@cache
def _warn_of_guess(kind: str, sizes: tuple[int, ...]) -> None:
    found = (
        f"tensors of {' and '.join(map(str, sizes))} rows; the first is taken" if sizes else "no tensor; it counts as 1"
    )
    warnings.warn(
        f"The number of samples of a {kind} from a loader of your own is not known: it has {found}. Means over batches"
        " weigh by it. Return a torch DataLoader of map-style data, or give FederatedDataModule a collate_fn in the"
        " place of an overridden loader: their samples are counted.",
        stacklevel=3,
    )

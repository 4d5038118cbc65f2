"""Decide which of Lightning's two packages is used, ``lightning`` or ``pytorch_lightning``.

Both have the same code and unlike classes: a module of one is no module of the other. The decision is made once, when
lightning_fed is imported: by the environment variable ``LIGHTNING_FED_PACKAGE``, else by what is imported already, else
by what is installed; ``lightning`` where both are. :mod:`lightning_fed.lightning` then imports everything from there,
and :mod:`lightning_fed.lightning.mixtures` refuses objects of the other package.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

VARIABLE = "LIGHTNING_FED_PACKAGE"

#: What Lightning calls its Trainer's part and its Fabric part, by the name of the package that is installed.
PARTS = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}

#: Top-level names of all parts.
ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")

#: Versions of either package whose private loops this package is tested with: from the first to before the second.
SUPPORTED = (Version("2.6.6"), Version("2.7"))

#: Names of Lightning that lightning_fed uses, by module of the Trainer's part or of Fabric; "theirs=ours" renames.
NAMES = {
    "fabric.utilities.seed": "_collect_rng_states=collect_rng_states _set_rng_states=set_rng_states reset_seed",
    "callbacks": "BatchSizeFinder Checkpoint EarlyStopping LearningRateFinder ModelCheckpoint ModelPruning ProgressBar"
    " RichProgressBar StochasticWeightAveraging TQDMProgressBar",
    "core.optimizer": "LightningOptimizer",
    "loggers": "CSVLogger CometLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "loops.fit_loop": "_FitLoop",
    "loops.loop": "_Loop=Loop",
    "loops.training_epoch_loop": "_TrainingEpochLoop",
    "plugins.io": "AsyncCheckpointIO CheckpointIO TorchCheckpointIO",
    "plugins.precision": "DoublePrecision Precision",
    "profilers": "PassThroughProfiler",
    "strategies": "DDPStrategy SingleDeviceStrategy Strategy StrategyRegistry",
    "strategies.launchers.multiprocessing": "_MultiProcessingLauncher=MultiProcessingLauncher",
    "trainer.call": "_call_callback_hooks=call_callback_hooks _call_lightning_module_hook=call_module_hook"
    " _call_strategy_hook=call_strategy_hook",
    "trainer.connectors.logger_connector.result": "_ResultCollection=ResultCollection",
    "utilities": "rank_zero_info rank_zero_only",
    "utilities.combined_loader": "CombinedLoader",
    "utilities.data": "_extract_batch_size=extract_batch_sizes",
    "utilities.exceptions": "MisconfigurationException SIGTERMException",
    "utilities.model_helpers": "is_overridden=is_overridden_in",
    "utilities.seed": "isolate_rng",
    "utilities.signature_utils": "is_param_in_hook_signature",
}


def decide() -> tuple[str, str]:
    """The name of the package, and the reason in words."""
    named = os.environ.get(VARIABLE)
    if named:
        return _checked(named), f"{VARIABLE}={named}"
    imported = [name for name, (trainer, _) in PARTS.items() if sys.modules.get(trainer)]  # None: barred
    if imported:
        return imported[0], _reason(imported, "imported before lightning_fed")
    installed = [name for name in PARTS if _is_installed(name)]
    if not installed:
        raise ImportError(
            "lightning_fed needs Lightning. Run: pip install lightning, or: pip install pytorch-lightning"
        )
    return installed[0], _reason(installed, "installed, and neither was imported before lightning_fed")


def _reason(names: list[str], how: str) -> str:
    return f"both packages were {how}" if len(names) > 1 else f"it was {how.partition(',')[0]}"


def _checked(named: str) -> str:
    if named not in PARTS:
        raise ImportError(f"{VARIABLE} must be {' or '.join(PARTS)}, got {named!r}.")
    if not _is_installed(named):
        pip = named.replace("_", "-")
        raise ImportError(f"{VARIABLE}={named}, but {named} is not installed. Run: pip install {pip}")
    return named


def _is_installed(name: str) -> bool:
    """Whether a package can be imported; looks for its folder, because the import of ``lightning`` takes seconds."""
    trainer = PARTS[name][0]
    if sys.modules.get(trainer):
        return True
    spec = find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    inner = trainer.split(".")[1:]
    return any(Path(folder, *inner, "__init__.py").is_file() for folder in folders or ())


#: The package that is used in this process, and why.
PACKAGE, REASON = decide()

#: The module that has ``Trainer``, and the one of Fabric.
TRAINER, FABRIC = PARTS[PACKAGE]

OTHER = next(name for name in PARTS if name != PACKAGE)


def load() -> dict[str, Any]:
    """Import :data:`NAMES` from the package that is used."""
    found = {}
    for place, names in NAMES.items():
        part = place.removeprefix("fabric.")
        module = import_module(f"{TRAINER if part == place else FABRIC}.{part}")
        for theirs, _, ours in (name.partition("=") for name in names.split()):
            found[ours or theirs] = getattr(module, theirs)
    return found


def check_lightning_version(version: str | None = None) -> None:
    """Refuse a version of Lightning whose private loops this package is not tested with."""
    found, (low, high) = version or str(import_module(TRAINER).__version__), SUPPORTED
    if not low <= Version(found) < high:
        pip = PACKAGE.replace("_", "-")
        raise ImportError(
            f"lightning_fed builds on Lightning's loops: it needs {pip} >={low},<{high}, found {found}."
            f' Run: pip install "{pip}>={low},<{high}"'
        )


_PATH = re.compile(rf"(?<![\w./]){re.escape(PARTS[OTHER][0])}((?:\.\w+)*\.[A-Z]\w*)(?![\w./])")


def in_this_package(text: str) -> str:
    """Text of a config, or an argument, with the other package's class paths replaced by those of this package."""
    return _PATH.sub(rf"{TRAINER}\1", text)

"""Public names of metrics that a module logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, count

#: Figures over clients that are logged beside the mean of a metric: its name with these at the end.
SPREAD = ("sd", "worst_decile", "worst")
#: Names of the two metrics that every evaluation has.
LOSS, ACCURACY = "loss", "accuracy"

_STAGE = re.compile(r"^(train|training|val|valid|validation|test|eval)[\W_]+(?=[^\W_])", re.IGNORECASE)


@lru_cache(maxsize=1024)  # asked for every client
def short_name(logged: str) -> str:
    """The name without its stage, in letters, digits and underscores, which every logger takes.

    >>> [short_name(name) for name in ("val_loss", "test/F1 (macro)", "top-5", "valence", "train_", "%")]
    ['loss', 'F1_macro', 'top_5', 'valence', 'train', 'metric']
    """
    return _plain(_STAGE.sub("", logged))


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "metric"


def public_names(logged: Iterable[str]) -> dict[str, str]:
    """Public names of metrics by their logged names; unlike logged names have unlike public ones.

    The first metric that asks for a short name has it. A later one keeps its whole name, with a number if that is taken
    too. ``loss`` and ``accuracy``, and what is logged beside the mean of another metric, are taken from the beginning.

    >>> public_names(["val_f1", "test_f1", "f1", "loss", "val_loss_sd"])
    {'val_f1': 'f1', 'test_f1': 'test_f1', 'f1': 'f1_2', 'loss': 'loss_2', 'val_loss_sd': 'val_loss_sd'}
    """
    names: dict[str, str] = {}
    taken = {LOSS, ACCURACY}
    for name in logged:
        whole = _plain(name)
        candidates = chain([short_name(name), whole], (f"{whole}_{i}" for i in count(2)))
        names[name] = next(candidate for candidate in candidates if not _clashes(candidate, taken))
        taken.add(names[name])
    return names


def _clashes(name: str, taken: set[str]) -> bool:
    """Whether a name, or a figure that is logged beside it, is a taken name or a figure beside a taken name."""
    derived = {f"{name}_{figure}" for figure in SPREAD}
    bases = {name.removesuffix(f"_{figure}") for figure in SPREAD}
    return bool(({name} | derived | bases) & taken)

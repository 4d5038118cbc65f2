"""Which side of a metric is the better one, as far as its name says so."""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*")
_LOWER = frozenset({"loss", "error", "mae", "mse", "rmse", "perplexity"})
_HIGHER = frozenset({"acc", "accuracy", "f1", "auroc", "precision", "recall", "r2"})
_SPREAD = frozenset({"sd", "std"})  # of a metric, whose side says nothing of its spread


def direction(name: str) -> bool | None:
    """Whether higher values are better, as far as the words of a name say so without contradiction; None otherwise.

    >>> [direction(name) for name in ("val_acc5", "MulticlassF1Score", "MeanAbsoluteError", "rmse", "R2Score")]
    [True, True, False, False, True]
    >>> [direction(name) for name in ("score", "accuracy_loss", "lr", "test_accuracy_sd")]
    [None, None, None, None]
    """
    words = {word.lower() for word in _WORD.findall(name)}
    words |= {word.rstrip("0123456789") for word in words}
    lower, higher = bool(words & _LOWER), bool(words & _HIGHER)
    return None if lower == higher or words & _SPREAD else higher

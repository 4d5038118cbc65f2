"""Advice on frequent errors of other libraries in a federation."""

from __future__ import annotations

_ONE_SAMPLE = (
    " A batch of one sample reached BatchNorm in training, which has no variance to normalise by. Use drop_last=True, a"
    " batch_size that does not leave one sample over, or local_steps, whose batches are never short; leave out clients"
    " that have one sample; or put GroupNorm in the place of BatchNorm."
)


def remedy_for(error: Exception) -> str:
    """Advice to append to the text of a known error; empty for others.

    >>> remedy_for(ValueError("Expected more than 1 value per channel when training, got input size [1, 8]"))[:48]
    ' A batch of one sample reached BatchNorm in trai'
    >>> remedy_for(ValueError("Expected a cup of tea"))
    ''
    """
    alone = "Expected more than 1 value per channel when training" in str(error)
    return _ONE_SAMPLE if isinstance(error, ValueError) and alone else ""

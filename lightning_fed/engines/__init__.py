"""Engines ask the clients of a cohort: one after another, in worker processes, or as a stack."""

from lightning_fed.engines.sequential import (
    ClientError,
    DistanceError,
    DivergenceError,
    SequentialEngine,
    TimeLimitError,
)

__all__ = ["ClientError", "DistanceError", "DivergenceError", "SequentialEngine", "TimeLimitError"]

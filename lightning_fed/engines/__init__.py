"""Ways to ask a cohort: one client after another, through Lightning's own optimisation loops."""

from lightning_fed.engines.sequential import (
    ClientError,
    DistanceError,
    DivergenceError,
    SequentialEngine,
    TimeLimitError,
)

__all__ = ["ClientError", "DistanceError", "DivergenceError", "SequentialEngine", "TimeLimitError"]

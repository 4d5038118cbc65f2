"""Ways to ask a cohort: one client after another, through Lightning's own optimisation loops."""

from lightning_fed.engines.sequential import ClientError, DivergenceError, SequentialEngine

__all__ = ["ClientError", "DivergenceError", "SequentialEngine"]

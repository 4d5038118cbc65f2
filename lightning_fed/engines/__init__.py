"""Ways to ask a cohort: one client after another, through Lightning's own optimisation loops."""

from lightning_fed.engines.sequential import ClientError, SequentialEngine

__all__ = ["ClientError", "SequentialEngine"]

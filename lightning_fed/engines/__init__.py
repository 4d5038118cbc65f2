"""Engines ask the clients of a cohort: one after another, in worker processes, or as a stack."""

from lightning_fed.engines.sequential import ClientError, DivergenceError, SequentialEngine

__all__ = ["ClientError", "DivergenceError", "SequentialEngine"]

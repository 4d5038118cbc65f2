"""LEAF's text and faces by user, from the JSON that its scripts write."""

from lightning_fed.datamodules.leaf.leaf import Leaf

__all__ = ["Leaf"]

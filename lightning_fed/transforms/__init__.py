"""Transforms of messages in transit: message -> message, composable; `algorithms.Compressed` applies them."""

from lightning_fed.transforms.base import Compose, Sent, Transform
from lightning_fed.transforms.clip import Clip
from lightning_fed.transforms.quantize import Quantize
from lightning_fed.transforms.top_k import TopK

__all__ = ["Clip", "Compose", "Quantize", "Sent", "TopK", "Transform"]

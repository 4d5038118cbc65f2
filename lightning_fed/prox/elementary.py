"""Formulas that several ``g`` share; each works along the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fed.core.prox import length as length


def soft(v: Tensor, tau: float) -> Tensor:
    """Move every entry towards 0 by ``tau``, at most to 0."""
    return v.sign() * (v.abs() - tau).clamp(min=0)


def shorten(v: Tensor, tau: float) -> Tensor:
    """Shorten every vector by ``tau``, at most to 0."""
    norm = length(v, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    return v * (1 - tau / norm).clamp(min=0)


def onto_simplex(v: Tensor, total: float) -> Tensor:
    r"""Nearest point with entries >= 0 that sum to ``total``: :math:`\max(v - \theta, 0)`.

    With :math:`u` the sorted entries, :math:`\theta_j = (\sum_{l\le j} u_l - total)/j` rises as long as
    :math:`u_{j+1} > \theta_j` and falls from there on, so that :math:`\theta = \max_j \theta_j`.
    """
    v = v - v.amax(-1, keepdim=True)  # the projection is the same, without loss of digits to a large common part
    u = v.sort(dim=-1, descending=True).values
    j = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    theta = ((u.cumsum(-1) - total) / j).amax(-1, keepdim=True)
    return (v - theta).clamp(min=0)


def onto_l1_ball(v: Tensor, radius: float) -> Tensor:
    """Nearest point whose absolute values sum to ``radius`` or less."""
    inside = v.abs().sum(-1, keepdim=True) <= radius
    return torch.where(inside, v, v.sign() * onto_simplex(v.abs(), radius))

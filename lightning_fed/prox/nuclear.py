from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Selective
from lightning_fed.prox.elementary import soft


@dataclass(frozen=True)
class Nuclear(Selective):
    r""":math:`g(X) = c\sum_j\sigma_j(X)` of every matrix: its prox shrinks the singular values, so the rank falls.

    Linear layers are taken as they are, convolutions as out x (in k k).

    >>> from lightning_fed.core.layout import Layout
    >>> g = Nuclear(1.0).bind(Layout.of(torch.nn.Linear(2, 2, bias=False)))
    >>> g.prox(torch.tensor([3.0, 0.0, 0.0, 0.5]), 1.0)
    tensor([2., 0., 0., 0.])
    """

    c: float = 1.0
    on: Patterns = None
    scope = "per_tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c)

    def view(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2:
            raise ValueError(
                f"Nuclear is for matrices, but {name} has shape {shape}. Choose the matrices by name, such as"
                ' on="*.weight"; names after ! are left out, such as on=["*.weight", "!norm*"].'
            )
        return shape[0], math.prod(shape[1:])

    def value(self, x: Tensor) -> Tensor:
        sigma: Tensor = torch.linalg.svdvals(_at_least_float32(x))
        return self.c * sigma.sum(-1).to(x.dtype)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        U, sigma, Vh = torch.linalg.svd(_at_least_float32(v), full_matrices=False)
        X: Tensor = (U * soft(sigma, t * self.c).unsqueeze(-2)) @ Vh
        return X.to(v.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))  # there is no SVD in half precision

"""synthetic-(a, b): logistic data whose clients differ by a given degree."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.validation import one_of, positive, whole
from lightning_fed.data.datamodule import FederatedDataModule

FEATURES, CLASSES = 60, 10

Samples = tuple[NDArray[np.float64], NDArray[np.int64]]


class Synthetic(FederatedDataModule):
    r"""Clients k with samples :math:`x \sim N(v_k, \Sigma)` and labels :math:`\arg\max(W_k^\top x + b_k)`.

    .. math::
        v_k \sim N(B_k, I), \quad B_k \sim N(0, b^2), \quad W_k, b_k \sim N(u_k, 1), \quad u_k \sim N(0, a^2), \quad
        \Sigma = \mathrm{diag}(j^{-1.2})

    Every client keeps 90 % of its samples to train on and 10 % to test on; sizes are heavy-tailed (50 and more).

    ``a`` has no effect on the data: :math:`u_k` shifts all ten logits of a sample by the same amount, so its label
    stays. It is an argument because the sets are known by both numbers; for one seed, only ``b`` makes them differ.
    Even ``a = b = 0`` is not iid, since every client has its own :math:`W_k, b_k, v_k`.

    Args:
        a: standard deviation of :math:`u_k`; see above.
        b: standard deviation of :math:`B_k`: how far apart the samples of different clients lie.
        iid: one :math:`W, b` for all clients, and :math:`v_k = 0`.
        clients: number of clients, called f_00000, f_00001, ...
        seed: seeds the stream of all draws; the split into train and test is seeded by ``seed + 1``.
        dtype: of the samples; labels are int64.
        batch_size: of training batches.
        loading: other arguments of :class:`~lightning_fed.FederatedDataModule`: ``eval_batch_size`` (8192 by default),
            ``drop_last``, ``sampler``, ``val_fraction`` (a share of the 90 %, by default none) and ``loader_options``.

    Reference: arXiv:1812.06127.

    >>> data = Synthetic(clients=3)
    >>> data.setup()
    >>> data.client_ids, data.num_examples("f_00000")  # 90 % of 1909
    (['f_00000', 'f_00001', 'f_00002'], 1718)
    """

    def __init__(
        self,
        a: float = 1.0,
        b: float = 1.0,
        iid: bool = False,
        clients: int = 30,
        seed: int = 0,
        batch_size: int = 2,
        dtype: Literal["float32", "float64"] = "float32",
        **loading: Any,
    ) -> None:
        super().__init__(
            None,
            loading.pop("val_fraction", 0.0),
            None,
            batch_size=batch_size,
            eval_batch_size=loading.pop("eval_batch_size", 8192),
            **loading,
        )
        loading.update(eval_batch_size=self.eval_batch_size, val_fraction=self.val_fraction)
        self.save_hyperparameters(ignore=["sampler", "loader_options"])  # functions have no place in checkpoints
        self.a, self.b, self.iid, self.clients, self.seed, self.dtype = a, b, iid, clients, seed, dtype
        positive(self, "a", "It is a standard deviation.", zero=True)
        positive(self, "b", "It is a standard deviation.", zero=True)
        whole(self, "clients", 1)
        whole(self, "seed", 0)
        if seed > 2**32 - 2:
            raise ValueError(
                f"Synthetic.seed must be at most 2**32 - 2, the limit of legacy NumPy streams, got {seed}."
            )
        one_of(self, "iid", (True, False))
        one_of(self, "dtype", ("float32", "float64"))
        self.description = "synthetic-iid" if iid else f"synthetic-({a:g},{b:g})"

    def setup(self, stage: str | None = None) -> None:
        if self.has_split("train"):
            return
        splits: dict[str, dict[ClientId, TensorDataset]] = {"train": {}, "test": {}}
        shuffle = np.random.RandomState(self.seed + 1)
        for name, (x, y) in generate(self.a, self.b, self.clients, self.seed, self.iid).items():
            features = torch.from_numpy(x).to(getattr(torch, self.dtype))
            labels = torch.from_numpy(y)
            order = torch.from_numpy(shuffle.permutation(len(y)))
            train, test = order.tensor_split([9 * len(y) // 10])
            splits["train"][name] = TensorDataset(features[train], labels[train])
            splits["test"][name] = TensorDataset(features[test], labels[test])
        for split, datasets in splits.items():
            self.set_split(split, datasets)


def generate(a: float = 1.0, b: float = 1.0, clients: int = 30, seed: int = 0, iid: bool = False) -> dict[str, Samples]:
    """Draw samples and labels of every client from one legacy stream; sizes do not depend on ``a`` and ``b``.

    >>> x, y = generate(clients=2)["f_00000"]
    >>> x.shape[1], y.dtype
    (60, dtype('int64'))
    """
    # The legacy stream is frozen by NumPy: the data are the same in every version, which the check values rely on.
    rng = np.random.RandomState(seed)
    sizes = 50 + rng.lognormal(4, 2, clients).astype(int)
    u = rng.normal(0, a, clients)
    B = rng.normal(0, b, clients)
    v = np.zeros((clients, FEATURES)) if iid else np.stack([rng.normal(B_k, 1, FEATURES) for B_k in B])
    scale = np.arange(1, FEATURES + 1) ** -0.6
    labeller = _labeller(rng, 0.0) if iid else None
    data: dict[str, Samples] = {}
    for k in range(clients):
        W_k, b_k = labeller or _labeller(rng, u[k])
        x = v[k] + scale * rng.standard_normal((sizes[k], FEATURES))
        data[f"f_{k:05d}"] = x, (x @ W_k + b_k).argmax(axis=1)
    return data


def _labeller(rng: np.random.RandomState, mean: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return rng.normal(mean, 1, (FEATURES, CLASSES)), rng.normal(mean, 1, CLASSES)

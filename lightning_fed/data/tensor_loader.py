"""Samples that are rows of tensors: batches by one index, without worker processes or collation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

#: Makes the tensors of a batch from the stored tensors, such as floats from bytes.
Transform = Callable[[list[Tensor]], list[Tensor]]
TransformT = TypeVar("TransformT", bound=Transform)
#: Tensors, the rows of them to use (all if None), and the transform that makes samples of rows.
Memory = tuple[tuple[Tensor, ...], Tensor | None, Transform | None]


def row_by_row(transform: TransformT) -> TransformT:
    """Declare that a transform makes each sample from its own rows alone, without drawing random numbers.

    Many batches can then be transformed at once. Without the declaration the transform gets one batch after another.

    >>> @row_by_row
    ... def scaled(batch):
    ...     return [batch[0] / 255]
    >>> is_row_by_row(scaled), is_row_by_row(lambda batch: batch)
    (True, False)
    """
    vars(transform)["row_by_row"] = True
    return transform


def is_row_by_row(transform: Transform | None) -> bool:
    """Whether a transform, if there is one, is declared to work row by row."""
    return transform is None or getattr(transform, "row_by_row", False) is True


class TensorRows(Dataset[tuple[Tensor, ...]]):
    """Rows of tensors that are transformed into samples on access; the tensors may be maps of files.

    Args:
        tensors: each with one row per sample, the labels last.
        rows: the rows to use.
        transform: applied to a batch of rows.

    >>> data = TensorRows([torch.tensor([0, 51, 255], dtype=torch.uint8)], torch.tensor([2, 1]), lambda b: [b[0] / 255])
    >>> data[0], len(data)
    ((tensor(1.),), 2)
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Tensor, transform: Transform) -> None:
        self.tensors, self.rows, self.transform = tuple(tensors), rows, transform

    @property
    def targets(self) -> Tensor:
        """The rows of the last tensor: the labels."""
        return self.tensors[-1][self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Several samples at once, as a ``DataLoader`` asks for them."""
        rows = self.rows[list(indices)]
        return list(zip(*self.transform([tensor[rows] for tensor in self.tensors]), strict=True))


class TensorLoader:
    """Batches of tensors in memory, as a ``DataLoader`` of a ``TensorDataset`` would collate them, but by one index.

    Args:
        rows: the rows of the tensors to use; all of them if None.
        transform: applied to every batch.
        shuffle: every iteration draws a new order, from ``generator``.
        batches: positions of the samples of each batch, instead of all samples in an order.

    >>> loader = TensorLoader([torch.arange(5)], batch_size=2)
    >>> [batch[0].tolist() for batch in loader], len(loader)
    ([[0, 1], [2, 3], [4]], 3)
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Tensor | None = None,
        transform: Transform | None = None,
        *,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        batches: Sequence[Tensor] | None = None,
    ) -> None:
        self.batches = batches
        self.tensors = tuple(tensors)
        self.rows = rows
        self.transform = transform
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = generator
        self.drop_last = drop_last

    @property
    def samples(self) -> int:
        return (self.tensors[0] if self.rows is None else self.rows).shape[0]

    def __len__(self) -> int:
        return len(self.sizes())

    def sizes(self) -> list[int]:
        """The number of samples of each batch."""
        if self.batches is not None:
            return [len(batch) for batch in self.batches]
        full, rest = divmod(self.samples, self.batch_size)
        return [self.batch_size] * full + [rest] * (rest > 0 and not self.drop_last)

    def all_rows(self) -> list[Tensor]:
        """All samples as they are stored, in their order."""
        return [tensor if self.rows is None else tensor[self.rows] for tensor in self.tensors]

    def order(self) -> Tensor:
        """The rows of one iteration, one batch after another; the last may be short."""
        n = self.samples
        order = torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n)
        return self._rows(order[: len(self) * self.batch_size] if self.drop_last else order)

    def _rows(self, order: Tensor) -> Tensor:
        return order if self.rows is None else self.rows[order]

    def rows_by_batch(self) -> Sequence[Tensor]:
        """The rows of each batch of one iteration."""
        if self.batches is not None:
            return [self._rows(batch) for batch in self.batches]
        return torch.split(self.order(), self.batch_size)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in self.rows_by_batch():
            tensors = [tensor[batch] for tensor in self.tensors]
            yield tensors if self.transform is None else self.transform(tensors)


def in_memory(dataset: Dataset[Any]) -> Memory | None:
    """Tensors, rows and transform of a ``TensorDataset`` or ``TensorRows``, or a ``Subset`` of one; None for others.

    >>> whole = TensorDataset(torch.arange(9))
    >>> in_memory(Subset(Subset(whole, [8, 6, 4]), [2, 0]))[1]
    tensor([4, 8])
    """
    # Exact types: a subclass may change what its samples are, such as by augmenting them.
    if type(dataset) is TensorDataset:
        return dataset.tensors, None, None
    if type(dataset) is TensorRows:
        return dataset.tensors, dataset.rows, dataset.transform
    if type(dataset) is Subset:
        memory = in_memory(dataset.dataset)
        if memory is not None:
            tensors, rows, transform = memory
            chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
            chosen = torch.where(chosen < 0, chosen + len(tensors[0] if rows is None else rows), chosen)
            return tensors, chosen if rows is None else rows[chosen], transform
    return None

"""Random transforms of training samples, whose draws depend on the place of a sample in its visit alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.utils.data import Dataset, Subset, default_collate

from lightning_fed.core.randomness import seed_global
from lightning_fed.data.loading import Collate, check_callable, fresh_generator
from lightning_fed.data.partition import labels_of
from lightning_fed.lightning import isolate_rng

#: Makes the input of a model from the input of a sample.
InputTransform = Callable[[Any], Any]


class Transformed(Dataset[tuple[Any, Any]]):
    """Samples ``(input, label)`` whose inputs pass through a transform when they are read.

    Args:
        samples: a map-style dataset of pairs.
        transform: of an input; draws no random numbers.

    >>> Transformed([(1.0, "a"), (2.0, "b")], lambda x: 10 * x)[1]
    (20.0, 'b')
    """

    def __init__(self, samples: Dataset[Any], transform: InputTransform) -> None:
        check_callable("transform", transform, "torchvision.transforms.v2.ToImage()")
        self.samples, self.transform = samples, transform

    @property
    def targets(self) -> NDArray[Any]:
        """One label per sample, without transforming a sample."""
        return labels_of(self.samples)

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, label = self.samples[index]
        return self.transform(x), label


class Augmented(Transformed):
    """Training samples ``(input, label)`` whose inputs are changed at random, anew whenever they are read.

    In a visit, the draws for a sample are a function of (seed, round, client, local epoch, place of the sample in the
    epoch): neither ``num_workers``, nor the engine, nor the order of clients changes them, and a resumed run draws the
    same. A plain ``Trainer`` draws from torch's global streams, as usual. Evaluation reads ``plain``.

    Args:
        samples: a map-style dataset of pairs, not transformed.
        transform: of an input; draws from the global streams of torch, NumPy or ``random``.
        plain: the same samples in the same order without random changes, as they are evaluated.

    >>> images = [(torch.full((4,), float(i)), i) for i in range(6)]
    >>> noisy = Augmented(images, lambda x: x + torch.rand(4), plain=images)
    >>> from lightning_fed import FederatedDataModule
    >>> data = FederatedDataModule({"ann": noisy}, batch_size=3)
    >>> epochs = [list(data.client_dataloader("ann", torch.Generator().manual_seed(seed))) for seed in (1, 1, 2)]
    >>> [torch.equal(epochs[0][0][0], epoch[0][0]) for epoch in epochs]
    [True, True, False]
    """

    def __init__(self, samples: Dataset[Any], transform: InputTransform, plain: Dataset[Any]) -> None:
        super().__init__(samples, transform)
        self.plain = plain
        if len(plain) != len(self):  # type: ignore[arg-type]
            raise ValueError(
                f"Augmented.plain must hold the same samples as samples; it has {len(plain)} of {len(self)}."  # type: ignore[arg-type]
            )


def as_augmented(dataset: Dataset[Any]) -> Augmented | None:
    """An ``Augmented`` dataset, or a ``Subset`` of one, as ``Augmented``; None for others.

    >>> whole = Augmented([(1, 0), (2, 0), (3, 0)], lambda x: -x, plain=[(1, 0), (2, 0), (3, 0)])
    >>> as_augmented(Subset(whole, [2, 0]))[0]
    (-3, 0)
    """
    if type(dataset) is Augmented:
        return dataset
    if type(dataset) is Subset and (whole := as_augmented(dataset.dataset)) is not None:
        return Augmented(Subset(whole.samples, dataset.indices), whole.transform, Subset(whole.plain, dataset.indices))
    return None


def evaluated(dataset: Dataset[Any]) -> Dataset[Any]:
    """The samples that are evaluated: those of an ``Augmented`` dataset without random changes."""
    augmented = as_augmented(dataset)
    return dataset if augmented is None else augmented.plain


class InVisit(Dataset[Any]):
    """Augmented samples by ``(place, index)``: the place of a sample in its epoch decides its draws.

    Batches are collated here, with draws of their own, since a collation may mix samples at random. The global streams
    are restored after each batch, since a module may draw from them, for dropout.
    """

    def __init__(
        self, augmented: Augmented, generator: Generator | None, collate_fn: Collate = default_collate
    ) -> None:
        source = fresh_generator() if generator is None else generator.clone_state()
        self.augmented, self.collate_fn = augmented, collate_fn
        self.seed = int(torch.empty((), dtype=torch.int64).random_(generator=source))

    def __len__(self) -> int:
        return len(self.augmented)

    def __getitem__(self, placed: tuple[int, int]) -> Any:
        return self.__getitems__([placed])

    def __getitems__(self, batch: Sequence[tuple[int, int]]) -> Any:
        """A batch, as a ``DataLoader`` with a collation that keeps it asks for it."""
        with isolate_rng():
            samples = list(self._drawn(batch))
            seed_global(self.seed, batch[0][0], "batch")
            return self.collate_fn(samples)

    def _drawn(self, batch: Sequence[tuple[int, int]]) -> Iterator[tuple[Any, Any]]:
        for place, index in batch:
            seed_global(self.seed, place)
            yield self.augmented[index]


def as_it_is(batch: Any) -> Any:
    """The batch of an ``InVisit``, which has collated it."""
    return batch


def placed(batches: Sequence[Tensor]) -> list[list[tuple[int, int]]]:
    """Each position of a sample with its place in the stream of all batches.

    >>> placed([torch.tensor([4, 0]), torch.tensor([4])])
    [[(0, 4), (1, 0)], [(2, 4)]]
    """
    places = count()
    return [[(next(places), index) for index in batch.tolist()] for batch in batches]

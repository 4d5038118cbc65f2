"""The pathological partition: every client has a few classes, and nothing of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import whole
from lightning_fed.data.partition.base import Indices, Partition, by_position, classes_of


@dataclass(frozen=True)
class Pathological(Partition):
    """Every client has exactly k classes, and the samples of a class are split evenly among its owners.

    Classes are dealt from shuffled decks, so that the numbers of owners of two classes differ by one at most. Unlike
    :class:`Shards`, which cuts wherever a shard is full, it gives all clients the same number of classes.

    Args:
        clients: number of clients; ``clients * classes_per_client`` must reach the number of classes, so that every
            class has an owner.
        classes_per_client: k, at most the number of classes.
        seed: decides who owns which class, and who gets which of its samples.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> labels = torch.arange(60) % 6
    >>> dealt = Pathological(clients=4, classes_per_client=3)(TensorDataset(torch.zeros(60, 1), labels))
    >>> [len(labels[indices].unique()) for indices in dealt.values()], sum(map(len, dealt.values()))
    ([3, 3, 3, 3], 60)
    """

    clients: int
    classes_per_client: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "clients", 1)
        whole(self, "classes_per_client", 1)
        whole(self, "seed")

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        names, label = np.unique(classes_of(dataset, self), return_inverse=True)
        self._check(len(names))
        rng = numpy_generator(self.seed, "Pathological")
        owners: list[list[int]] = [[] for _ in names]
        for client, classes in enumerate(self._hands(len(names), rng)):
            for c in classes:
                owners[c].append(client)
        held: list[list[Indices]] = [[] for _ in range(self.clients)]
        for c, own in enumerate(owners):
            of_class = rng.permutation(np.flatnonzero(label == c))
            if len(of_class) < len(own):
                raise ValueError(
                    f"{self} gives class {names[c]} to {len(own)} clients, but it has {len(of_class)} samples. Use "
                    "fewer clients or fewer classes per client."
                )
            # The first parts are the larger ones, so owners come in a random order.
            for client, part in zip(rng.permutation(own), np.array_split(of_class, len(own)), strict=True):
                held[client].append(part)
        return by_position([np.concatenate(parts) for parts in held])

    def _hands(self, classes: int, rng: np.random.Generator) -> list[list[int]]:
        """The classes of each client, dealt from shuffled decks; no client gets a class twice."""
        deck: list[int] = []
        hands = []
        for _ in range(self.clients):
            hand, deck = deck[: self.classes_per_client], deck[self.classes_per_client :]
            missing = self.classes_per_client - len(hand)
            if missing:  # the deck is empty: a new one, from which the hand takes classes that it has not
                fresh = rng.permutation(classes).tolist()
                taken = [c for c in fresh if c not in hand][:missing]
                hand, deck = hand + taken, [c for c in fresh if c not in taken]
            hands.append(hand)
        return hands

    def _check(self, classes: int) -> None:
        k = self.classes_per_client
        if k > classes:
            raise ValueError(f"Pathological.classes_per_client is {k}, but the dataset has {classes} classes.")
        if self.clients * k < classes:
            raise ValueError(
                f"{self.clients} clients with {k} classes each cannot own all {classes} classes. Use at least"
                f" {-(-classes // k)} clients or {-(-classes // self.clients)} classes per client."
            )

"""One datamodule for a federation, and for the same data pooled in one place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, default_collate
from typing_extensions import Self

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import below_one, whole
from lightning_fed.data.augmented import InVisit, as_augmented, as_it_is, evaluated, placed
from lightning_fed.data.columns import class_names
from lightning_fed.data.huggingface import deal, formatted, splits_of
from lightning_fed.data.loading import (
    Collate,
    EpochSampler,
    PooledOrder,
    check_callable,
    cut_order,
    drawn_order,
    fresh_generator,
    loader_arguments,
)
from lightning_fed.data.partition import Rule, deal_samples, hold_out, num_samples
from lightning_fed.data.tensor_loader import Memory, TensorLoader, in_memory
from lightning_fed.data.tensor_loader import TensorRows as TensorRows
from lightning_fed.data.tensor_loader import row_by_row as row_by_row
from lightning_fed.data.validation_share import VAL_FRACTION, hold_out_share
from lightning_fed.lightning import pl, tell_checkpoints

SPLITS = ("train", "val", "test")

#: One dataset per client: by id, as pairs ``(id, dataset)``, or datasets alone, whose clients are called 0, 1, 2, ...
Federation = Mapping[ClientId, Dataset[Any]] | Sequence[tuple[ClientId, Dataset[Any]]] | Sequence[Dataset[Any]]


class FederatedDataModule(pl.LightningDataModule):
    """One dataset per client.

    Under :class:`~lightning_fed.FederatedServer` every client trains on its own data; under a plain ``Trainer`` the
    same datamodule pools them, which is the centralised baseline. Without validation data, validation reads the test
    data: to choose a model by it (early stopping, best checkpoint), give ``val``.

    Args:
        train: training data, by client: a mapping from id to dataset, or a list of pairs ``(id, dataset)``; the clients
            of a plain list of datasets get the ids 0, 1, 2, ... in its order.
        val, test: data to evaluate on, of some or all of these clients. ``val`` may also be the share of its training
            samples that every client holds out at random, such as 0.1: at least one of a client that has two or more.
        batch_size: size of training batches, local or pooled.
        eval_batch_size: size of all other batches.
        drop_last: leave out the short last batch of a training epoch; ``local_steps`` has no short batches.
        sampler: ``sampler(dataset, generator)`` gives the positions of the samples of one local epoch of one client: a
            torch ``Sampler``, or any iterable, of any length. It draws from ``generator`` alone. Only for training.
        loader_options: arguments of ``DataLoader`` by name, for training and evaluation alike: ``collate_fn``,
            ``num_workers``, ``pin_memory``, ... ``collate_fn`` makes a batch from a list of samples; a batch may be
            anything that your module takes, and is weighted by the number of its samples. Without a ``collate_fn``,
            tensors in memory are indexed directly, and the options do not apply to them.

    ``description`` describes the data in one line, for logs, trackers and figures; ``class_names`` names the classes
    0, 1, ... in tables and figures.

    A subclass that has to load its data first leaves ``train`` out and calls :meth:`set_split` in ``setup``.

    >>> from torch.utils.data import TensorDataset
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.zeros(3, 2)), "bob": TensorDataset(torch.ones(5, 2))})
    >>> data.client_ids, data.num_examples("bob")
    (['ann', 'bob'], 5)

    Sequences of different lengths, packed:

    >>> from torch.nn.utils.rnn import pack_sequence
    >>> sequences = [torch.ones(3), torch.ones(1), torch.ones(2)]
    >>> packed = lambda samples: pack_sequence(samples, enforce_sorted=False)
    >>> data = FederatedDataModule({"ann": sequences}, loader_options={"collate_fn": packed})
    >>> [batch.batch_sizes.tolist() for batch in data.client_eval_dataloader("ann", "train")]
    [[3, 2, 1]]
    """

    description: str = ""
    class_names: Sequence[str] = ()
    #: A subclass may also write it as a method.
    collate_fn: Collate | None = None
    sampler: EpochSampler | None = None

    def __init__(
        self,
        train: Federation | None = None,
        val: Federation | float | None = None,
        test: Federation | None = None,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 1024,
        drop_last: bool = False,
        sampler: EpochSampler | None = None,
        loader_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.drop_last = drop_last
        whole(self, "batch_size", 1)
        whole(self, "eval_batch_size", 1)
        self.val_fraction, val = (val, None) if isinstance(val, (float, int, str)) else (0.0, val)
        below_one(self, "val_fraction", "It is the share of its training samples that a client holds out.")
        check_callable("sampler", sampler, "lambda dataset, generator: RandomSampler(dataset, generator=generator)")
        if sampler is not None:
            self.sampler = sampler
        self.loader_options = loader_arguments(loader_options)
        if (collate_fn := self.loader_options.pop("collate_fn", None)) is not None:
            self.collate_fn = collate_fn
        self.splits: dict[str, dict[ClientId, Dataset[Any]]] = {}
        for split, datasets in zip(SPLITS, (train, val, test), strict=True):
            if datasets is not None:
                self.set_split(split, datasets)

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset[Any],
        partition: Rule,
        *,
        test_fraction: float = 0.0,
        val_fraction: float = 0.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Deal one dataset to clients.

        Args:
            partition: decides which client gets which sample: a partitioner of :mod:`lightning_fed.partition`, or any
                function that :func:`~lightning_fed.partition.as_partitioner` takes.
            test_fraction, val_fraction: share that every client holds out, at random: at least one sample if the client
                has two or more, never all. A client with a single sample only trains.
            seed: decides which samples are held out, and seeds a function that deals samples.
            kwargs: arguments of the constructor.

        >>> from torch.utils.data import TensorDataset
        >>> from lightning_fed.data.partition import IID
        >>> pixels = TensorDataset(torch.zeros(20, 2), torch.arange(20))
        >>> data = FederatedDataModule.from_dataset(pixels, IID(clients=2), test_fraction=0.2)
        >>> data.num_examples(0), len(data.client_dataset(0, "test"))
        (8, 2)
        """
        fractions = {"test": test_fraction, "val": val_fraction}
        _check_fractions(fractions, kwargs)
        dealt = deal_samples(partition, dataset, seed)
        splits: dict[str, dict[ClientId, Dataset[Any]]] = {split: {} for split in SPLITS}
        for cid, indices in dealt.items():
            for split, kept in hold_out(indices, fractions, numpy_generator(seed, "hold out", cid)).items():
                splits[split][cid] = Subset(dataset, kept)
        for split, fraction in fractions.items():
            if fraction and not splits[split]:
                raise ValueError(f"{split}_fraction is {fraction}, but no client has a sample to spare for {split}.")
        held: dict[str, Any] = {split: clients for split, clients in splits.items() if clients}
        return cls(**held, **kwargs)

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        by: str | Rule,
        *,
        label: str | None = None,
        columns: Sequence[str] | None = None,
        test_fraction: float = 0.0,
        val_fraction: float = 0.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Deal a ``datasets.Dataset`` or ``DatasetDict`` of Hugging Face to clients, without decoding its samples.

        Args:
            dataset: the training data, or a dict with ``"train"`` and perhaps ``"validation"`` and ``"test"``. These
                are dealt by the same column if ``by`` names one that they have: such a client may be one that does
                not train. Otherwise they are the server's: data of one client, ``"server"``, that is never visited.
            by: the name of the column that says whose a sample is, such as ``"speaker"``, or a partition
                as in :meth:`from_dataset`.
            label: the column that partitioners by label read; ``"label"``, ``"labels"`` or the only ``ClassLabel``
                needs no name.
            columns: the columns that a sample has in training; all of them by default. Samples become tensors, unless
                the dataset has a format or transform of its own or ``loader_options`` has a ``collate_fn``.
            test_fraction, val_fraction, seed, kwargs: as in :meth:`from_dataset`.

        A batch is a dict from column to tensor:

        >>> from datasets import Dataset  # doctest: +SKIP
        >>> speech = Dataset.from_dict({"speaker": ["ann", "bob", "ann"], "ids": [[1, 2], [3, 4], [5, 6]]})
        ... # doctest: +SKIP
        >>> data = FederatedDataModule.from_huggingface(speech, by="speaker", columns=["ids"])  # doctest: +SKIP
        >>> next(iter(data.client_eval_dataloader("ann", "train")))  # doctest: +SKIP
        {'ids': tensor([[1, 2],
                [5, 6]])}
        """
        splits = splits_of(dataset)
        for split in splits:
            if kwargs.get(split) is not None:
                raise ValueError(f"Got both {split}= and a dataset with {split} data. Give one of them.")
        _check_fractions({"test": test_fraction, "val": val_fraction}, splits)
        collates = cls.collate_fn is not None or "collate_fn" in (kwargs.get("loader_options") or {})
        ready = {split: formatted(part, columns, collates) for split, part in splits.items()}
        dealt = deal(splits, by, label)
        data = cls.from_dataset(
            ready["train"],
            lambda _: dealt["train"],
            test_fraction=test_fraction,
            val_fraction=val_fraction,
            seed=seed,
            **kwargs,
        )
        for split in (split for split in ("val", "test") if split in ready):
            held = {cid: Subset(ready[split], rows) for cid, rows in dealt[split].items()}
            data.set_split(split, held, strangers=True)
        data.class_names = class_names(splits["train"], label) or data.class_names
        return data

    def set_split(self, split: str, datasets: Federation, *, strangers: bool = False) -> None:
        """Set and check the data of one split; set ``"train"`` first. ``val_fraction`` takes its share of these.

        Args:
            strangers: whether the split may hold clients without training data, which are evaluated but not visited.
        """
        _check_split(split)
        clients = _by_client(split, datasets)
        if split != "train" and "train" not in self.splits:
            raise ValueError(f"{type(self).__name__} got {split} data before train data. Set 'train' first.")
        for cid, dataset in clients.items():
            self._check_client(split, cid, dataset)
        splits = {**self.splits, split: clients}
        for name, members in splits.items():
            unknown = [cid for cid in members if cid not in splits["train"]]
            if unknown and not strangers:
                raise ValueError(
                    f"Client {unknown[0]!r} has {name} data, but no train data ({len(unknown)} such clients). "
                    f"There are train data of {_some(splits['train'])}."
                )
        if self.val_fraction and split == "val":
            raise ValueError(f"Got both val data and val_fraction={self.val_fraction}. Give one of them.")
        self.splits = splits
        if self.val_fraction and split == "train":
            self.hold_out_validation(self.val_fraction)

    def hold_out_validation(self, fraction: float = VAL_FRACTION) -> None:
        """Make a share of every client's training samples its validation data, in the place of those it had.

        Which samples these are depends on the client's id and its number of samples, not on any seed.

        >>> data = FederatedDataModule({"ann": list(range(20)), "bob": list(range(40))})
        >>> data.hold_out_validation(0.1)
        >>> data.num_examples("ann"), len(data.client_dataset("bob", "val"))
        (18, 4)
        """
        if not 0 < fraction < 1:
            raise ValueError(f"The share to hold out for validation must lie in (0, 1), got {fraction!r}. Try 0.1.")
        train, val = hold_out_share(self._members("train"), fraction)
        self.splits = {**self.splits, "train": train, "val": val}

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer that uses these data."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer
        if trainer is not None:  # the first that a fit does, before loggers open their runs
            tell_checkpoints(trainer)

    @property
    def client_ids(self) -> list[ClientId]:
        """All clients, in the order they were given."""
        return self.split_ids("train")

    def split_ids(self, split: str) -> list[ClientId]:
        """The clients that have data in ``split``."""
        return list(self._members(split))

    def num_examples(self, cid: ClientId) -> int:
        """Number of training samples of a client."""
        return num_samples(self.client_dataset(cid), f"train data of client {cid!r}")

    def has_split(self, split: str) -> bool:
        """Whether any client has data of ``split``: ``train``, ``val`` or ``test``."""
        _check_split(split)
        return split in self.splits

    def client_dataset(self, cid: ClientId, split: str = "train") -> Dataset[Any]:
        """The data of one client; an error names the clients that there are."""
        members = self._members(split)
        if cid in members:
            return members[cid]
        if cid in self.splits["train"]:
            raise ValueError(f"Client {cid!r} has no {split} data. There are {split} data of {_some(members)}.")
        raise ValueError(f"Unknown client {cid!r}. The federation has {_some(self.splits['train'])}.")

    def client_dataloader(
        self, cid: ClientId, generator: torch.Generator | None = None, *, shuffle: bool = True
    ) -> TensorLoader | DataLoader[Any]:
        """One local epoch: training batches in an order that is a function of ``generator`` only.

        A subclass that overrides this method cuts its own batches: a visit takes them in order, epoch after epoch.
        """
        dataset = self.client_dataset(cid)
        if shuffle and self.sampler is not None:
            order = self.sampled_order(cid, fresh_generator() if generator is None else generator)
            batches = cut_order(order, self.batch_size, self.drop_last)
            return self.batches_dataloader(cid, batches, None if generator is None else generator.clone_state())
        if as_augmented(dataset) is not None:
            n = self.num_examples(cid)
            places = torch.randperm(n, generator=generator) if shuffle else torch.arange(n)
            return self.batches_dataloader(cid, cut_order(places.tolist(), self.batch_size, self.drop_last), generator)
        memory = self._in_memory(dataset)
        if memory is not None:
            return TensorLoader(
                *memory, batch_size=self.batch_size, shuffle=shuffle, generator=generator, drop_last=self.drop_last
            )
        return self._dataloader(
            dataset,
            batch_size=self.batch_size,
            sampler=RandomSampler(dataset, generator=generator) if shuffle else None,  # type: ignore[arg-type]
            drop_last=self.drop_last,
            # DataLoader draws the seed of its workers first; a copy keeps the order equal to that of a TensorLoader.
            generator=None if generator is None else generator.clone_state(),
        )

    def batches_dataloader(
        self, cid: ClientId, batches: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> TensorLoader | DataLoader[Any]:
        """A loader of given batches of a client's training data; a batch is a tensor of positions of samples.

        ``generator`` seeds the processes that load data, and the draws of :class:`~lightning_fed.data.Augmented` data.
        """
        dataset = self.client_dataset(cid)
        if (augmented := as_augmented(dataset)) is not None:
            drawn = InVisit(augmented, generator, self.collate_fn or default_collate)
            return self._dataloader(drawn, batch_sampler=placed(batches), generator=generator, collate_fn=as_it_is)
        memory = self._in_memory(dataset)
        if memory is not None:
            return TensorLoader(*memory, batch_size=self.batch_size, batches=batches)
        return self._dataloader(dataset, batch_sampler=[batch.tolist() for batch in batches], generator=generator)

    def sampled_order(self, cid: ClientId, generator: torch.Generator, most: int | None = None) -> list[int]:
        """At most ``most`` positions that ``sampler`` gives for one epoch of a client."""
        assert self.sampler is not None
        return drawn_order(self.sampler, self.client_dataset(cid), generator, f"client {cid!r}", most)

    def client_eval_dataloader(self, cid: ClientId, split: str) -> TensorLoader | DataLoader[Any]:
        """All samples of a client's split, in their order, without random changes."""
        dataset = evaluated(self.client_dataset(cid, split))
        memory = self._in_memory(dataset)
        if memory is not None:
            return TensorLoader(*memory, batch_size=self.eval_batch_size)
        return self._dataloader(dataset, batch_size=self.eval_batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        """The training data of all clients in one place, shuffled.

        With a ``sampler``, an epoch has the samples that the sampler gives for each client, in one random order.
        """
        clients = self._members("train")
        pool: ConcatDataset[Any] = ConcatDataset(clients.values())
        order: dict[str, Any] = (
            {"shuffle": True} if self.sampler is None else {"sampler": PooledOrder(self.sampler, clients)}
        )
        return self._dataloader(pool, batch_size=self.batch_size, drop_last=self.drop_last, **order)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation data of all clients, else their test data, else none: Lightning then skips validation.

        A fit that stops early or keeps a best checkpoint by what is measured on test data warns.
        """
        for split in ("val", "test"):
            if self.has_split(split):
                return self._pooled_eval_dataloader(split)
        warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")  # meant here
        return []

    def test_dataloader(self) -> DataLoader[Any]:
        """The test data of all clients."""
        return self._pooled_eval_dataloader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test data of all clients, else their validation data, in the order of :meth:`split_ids`."""
        for split in ("test", "val"):
            if self.has_split(split):
                return self._pooled_eval_dataloader(split)
        raise ValueError(
            "trainer.predict(datamodule=...) predicts the test data of the clients, else their validation data; this"
            f" {type(self).__name__} has neither. Give it test=, or call trainer.predict(model, dataloaders=...)."
        )

    def _pooled_eval_dataloader(self, split: str) -> DataLoader[Any]:
        pool: ConcatDataset[Any] = ConcatDataset(map(evaluated, self._members(split).values()))
        return self._dataloader(pool, batch_size=self.eval_batch_size)

    def _in_memory(self, dataset: Dataset[Any]) -> Memory | None:
        """The tensors of a dataset that may be indexed directly; None with a ``collate_fn``, which needs samples."""
        return None if self.collate_fn is not None else in_memory(dataset)

    def _dataloader(self, dataset: Dataset[Any], **how: Any) -> DataLoader[Any]:
        return DataLoader(dataset, **{"collate_fn": self.collate_fn, **self.loader_options, **how})

    def _members(self, split: str) -> dict[ClientId, Dataset[Any]]:
        if not self.has_split(split):
            has = f"it has {', '.join(self.splits)}" if self.splits else "it is empty: call setup() or give train="
            raise ValueError(f"{type(self).__name__} has no {split} data; {has}.")
        return self.splits[split]

    def _check_client(self, split: str, cid: ClientId, dataset: Dataset[Any]) -> None:
        _check_id(split, cid)
        n = num_samples(dataset, f"{split} data of client {cid!r}")
        if n == 0:
            raise ValueError(f"Client {cid!r} has no {split} samples (length 0). Leave it out of {split}.")


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"Unknown split {split!r}; splits are {', '.join(SPLITS)}.")


def _check_id(split: str, cid: object) -> None:
    if isinstance(cid, bool) or not isinstance(cid, (int, str)):
        raise TypeError(f"Client ids are whole numbers or strings, got {cid!r} in the {split} data.")


def _by_client(split: str, datasets: object) -> dict[ClientId, Dataset[Any]]:
    if isinstance(datasets, Mapping):
        clients = dict(datasets)
    elif isinstance(datasets, Sequence) and not isinstance(datasets, str):
        pairs = any(map(_is_pair, datasets))
        clients = _from_pairs(split, datasets) if pairs else dict(enumerate(datasets))
    else:
        raise TypeError(
            f"{split} must be a mapping from client to dataset, or a sequence of datasets or of pairs (id, dataset); "
            f"got {type(datasets).__name__}. FederatedDataModule.from_dataset deals one dataset to clients."
        )
    if not clients:
        raise ValueError(f"There are no clients in {split}. Give one dataset per client, or leave {split} out.")
    return clients


def _is_pair(item: object) -> bool:
    """Whether an item is ``(id, dataset)``, and not a dataset that is a tuple of two samples."""
    if not isinstance(item, tuple) or len(item) != 2:
        return False
    cid, dataset = item
    if isinstance(dataset, Dataset):
        return True
    return isinstance(cid, (int, str)) and hasattr(dataset, "__getitem__") and not isinstance(dataset, str)


def _from_pairs(split: str, pairs: Sequence[Any]) -> dict[ClientId, Dataset[Any]]:
    clients: dict[ClientId, Dataset[Any]] = {}
    for i, pair in enumerate(pairs):
        if not _is_pair(pair):
            raise TypeError(
                f"{split} mixes pairs (id, dataset) with datasets: item {i} is a {type(pair).__name__}. Give an id to"
                " every dataset, or to none."
            )
        cid, dataset = pair
        _check_id(split, cid)
        if cid in clients:
            raise ValueError(f"Client {cid!r} has two datasets in {split}. Give each client its own id.")
        clients[cid] = dataset
    return clients


def _some(clients: Mapping[ClientId, object]) -> str:
    shown = ", ".join(repr(cid) for cid in list(clients)[:3])
    return f"{len(clients)} clients: {shown}{', ...' if len(clients) > 3 else ''}"


def _check_fractions(fractions: Mapping[str, float], kwargs: Mapping[str, object]) -> None:
    for split, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise ValueError(f"{split}_fraction must lie in [0, 1), got {fraction!r}.")
        if fraction and kwargs.get(split) is not None:
            raise ValueError(f"Got both {split}= and {split}_fraction={fraction}. Give one of them.")
    total = sum(fractions.values())
    if total >= 1:
        raise ValueError(f"test_fraction + val_fraction must stay below 1, to leave train data; got {total:g}.")

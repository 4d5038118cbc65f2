"""Deal a data set of torchvision to clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Subset

from lightning_fed.core.validation import below_one, whole
from lightning_fed.data.augmented import Augmented
from lightning_fed.data.datamodule import SPLITS, FederatedDataModule
from lightning_fed.data.partition import Rule, as_partitioner
from lightning_fed.datamodules.vision.catalogue import Source, find
from lightning_fed.datamodules.vision.checks import check_images, check_labels, check_steady, check_transforms
from lightning_fed.datamodules.vision.dealing import Dealing, Hand
from lightning_fed.datamodules.vision.pixels import View, floats, maybe_random, view


class Vision(FederatedDataModule):
    """Any classification data set of torchvision, dealt to clients.

    Args:
        dataset: its name, such as ``"CIFAR10"``, ``"EMNIST"`` or ``"ImageFolder"``, its class, or a class of your own
            by its dotted path.
        partition: decides which client gets which image, as in
            :meth:`~lightning_fed.FederatedDataModule.from_dataset`.
        root: the folder of its files.
        transform: of every image that is trained on, from the PIL image to a tensor: one of
            ``torchvision.transforms.v2``, or any function. The default gives pixels in [0, 1]. Random transforms draw
            anew for each image in each local epoch (:class:`~lightning_fed.data.Augmented`).
        eval_transform: of every image that is evaluated, those for training included; ``transform``, if that draws no
            random numbers.
        test: who holds the test images: ``"server"`` (one client of this name, which is never visited), or
            ``"clients"``: train and test images are dealt together, and each client tests on its own. A number is the
            share of its training images that each client tests on instead. The default is ``"server"``; of a data set
            without test images 0.1.
        options: other arguments of the data set's constructor, such as ``{"split": "byclass"}`` for EMNIST.
        val_fraction: the share of its training images that each client validates on. A data set with validation images
            of its own leaves them to the server. This and what follows is given by name.
        splits: values of its argument ``split`` or ``train`` for ``"train"``, ``"val"`` and ``"test"``, in the place of
            the usual ones: ``{"train": "extra", "test": "test"}`` for SVHN.
        seed: decides which images are held out, and seeds a function that deals them.
        download: whether to fetch files that are not in ``root``.
        in_memory: whether to keep images in memory, as bytes where ``eval_transform`` allows it; by default, if they
            take less than 1 GB. Only such data can be stacked.
        loading: other arguments of :class:`~lightning_fed.FederatedDataModule`: ``batch_size``, ``eval_batch_size``,
            ``drop_last``, ``sampler`` and ``loader_options``.

    >>> from lightning_fed.partition import Dirichlet
    >>> fake = {"size": 60, "image_size": (3, 8, 8), "num_classes": 3}
    >>> data = Vision("FakeData", Dirichlet(clients=4, alpha=1.0, min_examples=3), options=fake)
    >>> data.setup()
    >>> data.client_ids, data.has_split("test"), data.client_dataset(0)[0][0].shape
    ([0, 1, 2, 3], True, torch.Size([3, 8, 8]))
    """

    def __init__(
        self,
        dataset: str | type,
        partition: Rule,
        root: str | Path = "data",
        transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        test: Literal["server", "clients"] | float | None = None,
        options: dict[str, Any] | None = None,
        **loading: Any,
    ) -> None:
        val_fraction, seed, splits = (
            loading.pop("val_fraction", 0.0),
            loading.pop("seed", 0),
            loading.pop("splits", None),
        )
        download, in_memory = loading.pop("download", True), loading.pop("in_memory", None)
        super().__init__(
            None,
            None,
            None,
            batch_size=loading.pop("batch_size", 32),
            eval_batch_size=loading.pop("eval_batch_size", 512),
            **loading,
        )
        self.source = Source(find(dataset), Path(root), options or {}, splits)
        self.partition = as_partitioner(partition, seed)
        self.val_fraction, self.seed, self.download, self.in_memory = val_fraction, seed, download, in_memory
        whole(self, "seed")
        below_one(self, "val_fraction", "It is the share of its images that each client validates on.")
        self.dealing = Dealing(self.partition, test, val_fraction, tuple(self.source.splits), seed)
        self.val_fraction = 0.0  # not taken a second time by set_split: `dealing` holds it out, together with `test`
        check_transforms(transform, eval_transform)
        self.transform = floats() if transform is None else transform
        self.eval_transform = self.transform if eval_transform is None else eval_transform
        # plain values, as checkpoints can hold them; functions are left out
        dataset, root = self.source.name, str(root)
        options = {name: value for name, value in self.source.options.items() if not callable(value)}
        loading.update(batch_size=self.batch_size, eval_batch_size=self.eval_batch_size, val_fraction=val_fraction)
        loading.update(splits=splits, seed=seed, download=download, in_memory=in_memory)
        self.save_hyperparameters(ignore=["partition", "transform", "eval_transform", "sampler", "loader_options"])

    def prepare_data(self) -> None:
        """Download the files that are not there, if torchvision can."""
        if self.download and self.source.can_download:
            self.source.fetch()

    def setup(self, stage: str | None = None) -> None:
        if self.has_split("train"):
            return
        parts = {split: self.source.make(split) for split in self.source.splits}
        check_labels(self.source.name, parts["train"])
        check_steady(self.eval_transform, parts["train"][0][0])
        dealt = self.dealing.deal(parts)
        views = {
            name: self._views(part) for name, part in parts.items() if name in {used for used, _ in dealt.values()}
        }
        for split in (split for split in SPLITS if split in dealt):
            part, hand = dealt[split]
            read = views[part][split == "train"]
            self.set_split(split, {cid: read(rows) for cid, rows in hand.items()}, strangers=split != "train")
        if self.collate_fn is None:
            check_images(self)
        self.class_names = tuple(map(_first_name, getattr(parts["train"], "classes", ())))
        self.description = self._described({split: hand for split, (_, hand) in dealt.items()})

    def _views(self, part: Any) -> tuple[View, View]:
        """How to read images of a part of the data set: to evaluate, and to train on them."""
        alike = self.collate_fn is None
        evaluated = view(part, self.eval_transform, self.in_memory, alike)
        if self.transform is self.eval_transform:
            return evaluated, evaluated
        if not maybe_random(self.transform):
            return evaluated, view(part, self.transform, self.in_memory, alike)
        return evaluated, lambda rows: Augmented(Subset(part, rows), self.transform, evaluated(rows))

    def _described(self, hands: Mapping[str, Hand]) -> str:
        counts = {split: sum(map(len, hands[split].values())) for split in SPLITS if split in hands}
        images = ", ".join(f"{count} {split}" for split, count in counts.items())
        return f"{self.source.name} ({len(hands['train'])} clients, {images} images, {self.partition})"


def _first_name(names: Any) -> str:
    """The name of a class; the first, if it has several."""
    return str(names[0] if isinstance(names, tuple) and names else names)

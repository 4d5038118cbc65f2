"""Find a data set of torchvision by its name, and make its splits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.utils.data import Dataset

from lightning_fed.data.partition import num_samples
from lightning_fed.datamodules.vision.staging import staged

#: Values of ``split`` for train, val and test, where they are not "train", none and "test".
SPLITS: dict[str, tuple[str, str | None, str]] = {
    "CelebA": ("train", "valid", "test"),
    "CLEVRClassification": ("train", None, "val"),  # its test images have no labels
    "Country211": ("train", "valid", "test"),
    "DTD": ("train", "val", "test"),
    "FGVCAircraft": ("train", "val", "test"),
    "Flowers102": ("train", "val", "test"),
    "Imagenette": ("train", None, "val"),
    "ImageNet": ("train", None, "val"),
    "OxfordIIITPet": ("trainval", None, "test"),
    "PCAM": ("train", "val", "test"),
    "Places365": ("train-standard", None, "val"),
    "RenderedSST2": ("train", "val", "test"),
}

#: Data sets whose samples have no class, or are no single image.
UNCLASSIFIED = {
    "CarlaStereo", "Cityscapes", "CocoCaptions", "CocoDetection", "CREStereo", "ETH3DStereo", "FallingThingsStereo",
    "Flickr8k", "Flickr30k", "FlyingChairs", "FlyingThings3D", "HD1K", "HMDB51", "InStereo2k", "Kinetics", "Kitti",
    "Kitti2012Stereo", "Kitti2015Stereo", "KittiFlow", "LFWPairs", "Middlebury2014Stereo", "MovingMNIST", "PhotoTour",
    "SBDataset", "SBU", "SceneFlowStereo", "Sintel", "SintelStereo", "UCF101", "VisionDataset", "VOCDetection",
    "VOCSegmentation", "WIDERFace",
}  # fmt: skip

#: Arguments of a constructor that Vision sets itself, and by which of its own.
SET_ELSEWHERE = {
    "root": "root=",
    "train": "splits=",
    "download": "download=",
    "transform": "transform= and eval_transform=",
    "transforms": "transform= and eval_transform=",
}


class MissingDataError(FileNotFoundError):
    """The files of a data set are not where they should be."""


@dataclass(frozen=True)
class Source:
    """A class of data sets, with the arguments that make its splits.

    Args:
        kind: the class.
        root: the folder of its files.
        options: other arguments of its constructor.
        given: values of its ``split`` or ``train`` by split of ours, in the place of the usual ones.
    """

    kind: type[Dataset[Any]]
    root: Path
    options: Mapping[str, Any]
    given: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        known = accepted(self.kind)
        for name in self.options:
            if name in SET_ELSEWHERE:
                raise ValueError(f"Vision.options cannot hold {name!r}, which is set by {SET_ELSEWHERE[name]}.")
            if name not in known:
                free = [name for name in known if name not in SET_ELSEWHERE]
                raise ValueError(f"{self.name} has no argument {name!r} for Vision.options. It has {', '.join(free)}.")
        if self.name in UNCLASSIFIED and "target_transform" not in self.options:
            raise ValueError(
                f"Vision deals pairs of an image and a class; {self.name} has no classes. If they can be computed, give"
                " options={'target_transform': FUNCTION}; FederatedDataModule.from_dataset deals samples of any kind."
            )
        if missing := [name for name in needed(self.kind) if name not in {*SET_ELSEWHERE, *self.options}]:
            values = getattr(self.kind, f"{missing[0]}s", ())  # EMNIST has them
            one_of = f", one of {', '.join(values)}" if isinstance(values, tuple) and values else ""
            raise ValueError(f"{self.name} needs {missing[0]!r}{one_of}. Give it as options={{{missing[0]!r}: ...}}.")
        if self.given is not None and (self.selector is None or "train" not in self.given):
            needs = "must name 'train'" if self.selector else f"cannot be given: {self.name} has no split= or train="
            raise ValueError(f"Vision.splits {needs}, got {dict(self.given)}.")
        if unknown := [split for split in self.given or () if split not in ("train", "val", "test")]:
            raise ValueError(f"Vision.splits has keys out of train, val and test, got {unknown[0]!r}.")

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def selector(self) -> str | None:
        """The argument that chooses a split: ``train`` is a flag, ``split`` a word."""
        known = accepted(self.kind)
        if self.name == "QMNIST" and "what" in self.options:
            return None  # which it would follow, whatever train says
        if "train" in known:
            return "train"
        return "split" if "split" in known and "split" not in self.options else None

    @property
    def splits(self) -> dict[str, Any]:
        """The splits that the data set has, each with the value of the selector; one without value if it has none."""
        if self.given is not None:
            return dict(self.given)
        if self.selector is None:
            return {"train": None}
        words = SPLITS.get(self.name, ("train", None, "test")) if self.selector == "split" else (True, None, False)
        return {split: word for split, word in zip(("train", "val", "test"), words, strict=True) if word is not None}

    @property
    def can_download(self) -> bool:
        return "download" in accepted(self.kind)

    def make(self, split: str, download_to: Path | None = None) -> Dataset[Any]:
        """The data of a split; an error says what to do if they are not there."""
        known, download = accepted(self.kind), download_to is not None
        chosen = {} if self.selector is None else {self.selector: self.splits[split]}
        own = {"root": download_to or self.root, "download": download}
        try:
            dataset = self.kind(**{name: own[name] for name in own if name in known}, **self.options, **chosen)
            n = num_samples(dataset, f"{self.name} of torchvision")
            for i in {0, n - 1} if n else ():
                dataset[i]  # of half a download, only the lists of images may be there
        except (OSError, RuntimeError) as error:
            raise MissingDataError(self._advice(error, download)) from error
        except (AssertionError, EOFError, UnpicklingError, ValueError) as error:
            raise ValueError(
                f"{self.name} in {self.root.absolute()} cannot be read ({_text(error)}). Change Vision.options if it"
                " is about one of these; else files are damaged: delete them, and download or copy them again."
            ) from error
        if not n:
            raise MissingDataError(f"{self.name} in {self.root.absolute()} has no images for {split}.")
        return dataset

    def fetch(self) -> None:
        """Download the splits that are not there; those of torchvision all or nothing."""
        ours = self.kind.__module__.startswith("torchvision.")
        for split in self.splits:
            try:
                self.make(split)
            except MissingDataError:
                with staged(self.root) if ours else nullcontext(self.root) as folder:
                    self.make(split, download_to=folder)

    def _advice(self, error: Exception, download: bool) -> str:
        found = f"Vision could not {'download' if download else 'find'} {self.name} in {self.root.absolute()}"
        cause = f"{found} ({_text(error)})."
        if not self.can_download:
            return f"{cause} Give the folder of the images as root=."
        elsewhere = f"copy the folder from a machine that has one, where {self.name}(root, download=True) made it"
        if download:
            return f"{cause} Try again with a network, or {elsewhere}."
        return f"{cause} With a network, download=True fetches the data; without one, {elsewhere}."


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def needed(kind: type) -> list[str]:
    """Names of the arguments that a class's constructor must be given.

    >>> from torchvision.datasets import EMNIST
    >>> needed(EMNIST)
    ['root', 'split']
    """
    parameters = list(inspect.signature(kind).parameters.values())
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def accepted(kind: type) -> list[str]:
    """Names of the arguments of a class's constructor; of the bases' too, if it hands others on.

    >>> class Base:
    ...     def __init__(self, root, train=True): ...
    >>> class Own(Base):
    ...     def __init__(self, split, **kwargs): ...
    >>> accepted(Own)
    ['split', 'root', 'train']
    """
    names: list[str] = []
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in names]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


def find(dataset: object) -> type[Dataset[Any]]:
    """A class of data sets by its name in ``torchvision.datasets``, by its dotted path, or as it is.

    >>> find("MNIST").__name__
    'MNIST'
    >>> find("CIFAR")
    Traceback (most recent call last):
    ValueError: torchvision.datasets has no 'CIFAR'. Nearest: CIFAR10, CIFAR100. Another class needs a dotted path.
    """
    if isinstance(dataset, str):
        dataset = _imported(dataset) if "." in dataset else _named(dataset)
    if not isinstance(dataset, type) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"Vision takes a data set of torchvision by name or class, such as 'CIFAR10', got {dataset!r}. A data set"
            " that is made already is dealt by FederatedDataModule.from_dataset(dataset, partition)."
        )
    return dataset


def _named(name: str) -> type:
    from torchvision import datasets

    known = [each for each in datasets.__all__ if isinstance(getattr(datasets, each), type)]
    if name in known:
        found: type = getattr(datasets, name)
        return found
    lower = {each.lower(): each for each in known}
    near = [lower[each] for each in get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]
    hint = f"Nearest: {', '.join(near)}." if near else "MNIST, CIFAR10 and ImageFolder are some that it has."
    raise ValueError(f"torchvision.datasets has no {name!r}. {hint} Another class needs a dotted path.")


def _imported(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Vision.dataset is {path!r}, which cannot be imported: {error}.") from error

"""Refuse transforms, images and labels that cannot be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.randomness import seed_global
from lightning_fed.core.validation import is_whole
from lightning_fed.data.augmented import evaluated
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.datamodules.vision.pixels import maybe_random, steps_of, unlike
from lightning_fed.lightning import isolate_rng

#: Transforms of torchvision, beside those called Random..., that draw random numbers whatever their arguments.
RANDOM = {"AugMix", "AutoAugment", "ColorJitter", "ElasticTransform", "GaussianNoise", "JPEG", "RandAugment"}
RANDOM |= {"GaussianBlur", "ScaleJitter", "TrivialAugmentWide"}
#: Transforms of torchvision that mix the images of a batch, and their labels.
MIXING = {"CutMix", "MixUp"}
#: How often an image is transformed to evaluate it, to see whether it changes.
TRIALS = 8
#: Number of images whose shapes are compared, where not all are in memory.
SOME = 8


def check_transforms(transform: Any, eval_transform: Any) -> None:
    """Refuse what is no function, and evaluation at random."""
    for name, given in (("transform", transform), ("eval_transform", eval_transform)):
        if isinstance(given, type):
            raise TypeError(f"Vision.{name} is the class {given.__name__}. Give an object: {given.__name__}(...).")
        if given is not None and not callable(given):
            raise TypeError(f"Vision.{name} must be a function of an image such as v2.ToImage(), got {given!r}.")
        if mixing := [step for step in maybe_random(given) if step in MIXING]:
            raise ValueError(
                f"Vision.{name} has {', '.join(mixing)}, which mixes a batch, and here is one image. Leave it out, and"
                " begin training_step with images, labels = mix(images, labels) (docs/howto/vision.md)."
            )
    if eval_transform is None:
        if transform is not None and (names := maybe_random(transform)):
            raise ValueError(
                f"Vision.transform has {', '.join(names)}, which may draw random numbers; evaluation must not. Give"
                " eval_transform=, such as the same without random changes; if transform draws none, give it again."
            )
        return
    if names := [type(step).__name__ for step in steps_of(eval_transform) if _draws(step)]:
        raise ValueError(f"Vision.eval_transform has {', '.join(names)}, which draws random numbers. Leave it out.")


def _draws(step: Any) -> bool:
    """Whether a transform of torchvision, or of a class that inherits from one, is known to draw random numbers."""
    kinds = [kind.__name__ for kind in type(step).__mro__ if kind.__module__.startswith("torchvision.")]
    if "GaussianBlur" in kinds:
        return len(set(step.sigma)) > 1  # an interval from which it draws
    return any(name.startswith("Random") or name in RANDOM for name in kinds)


def check_steady(eval_transform: Any, image: Any) -> None:
    """Refuse an ``eval_transform`` that makes of an image whatever random numbers say."""
    if not maybe_random(eval_transform):
        return
    made = []
    with isolate_rng():
        for trial in range(TRIALS):
            seed_global(trial, "evaluation")
            made.append(eval_transform(image))
    if all(isinstance(each, Tensor) for each in made) and any(not _equal(each, made[0]) for each in made):
        raise ValueError(
            "Vision.eval_transform draws random numbers: it makes different images of the same one. Leave out the step"
            " that draws, so that evaluations can be compared."
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def check_labels(name: str, dataset: Any) -> None:
    """Refuse data sets whose samples are no pairs of an image and a class."""
    sample = dataset[0]
    pair = isinstance(sample, tuple | list) and len(sample) == 2
    label = sample[1] if pair else None
    if isinstance(label, Tensor | np.generic) and label.ndim == 0:
        label = label.item()
    if not is_whole(label):
        given = f"as label {label!r}" if pair else f"as sample a {type(sample).__name__}"
        raise ValueError(
            f"{name} gives {given}; Vision needs pairs of an image and a class, a whole number. An option of the data"
            " set may choose it, or options={'target_transform': FUNCTION} make it."
        )


def check_images(data: FederatedDataModule) -> None:
    """Refuse images that are no floating-point tensors, or not of one shape."""
    with isolate_rng():
        _check_tensor("transform", data.client_dataset(data.client_ids[0])[0][0])
    shapes: dict[tuple[int, ...], None] = {}
    for image in _some_images(data):
        _check_tensor("eval_transform", image)
        shapes.setdefault(tuple(image.shape), None)
    if len(shapes) > 1:
        raise unlike(shapes)


def _some_images(data: FederatedDataModule) -> Iterator[Any]:
    for split in data.splits:
        cids = data.split_ids(split)
        for cid in cids[:: -(-len(cids) // SOME)]:
            samples: Any = evaluated(data.client_dataset(cid, split))
            yield from (samples[i][0] for i in {0, len(samples) - 1})


def _check_tensor(name: str, image: Any) -> None:
    if not isinstance(image, Tensor):
        raise TypeError(
            f"Vision.{name} gives a {type(image).__name__}, not a tensor. End it with v2.ToImage() and"
            " v2.ToDtype(torch.float32, scale=True)."
        )
    if not image.is_floating_point():
        raise TypeError(
            f"Vision.{name} gives pixels of type {image.dtype}; models take floating-point numbers. Add"
            " v2.ToDtype(torch.float32, scale=True), which maps 0 to 255 to [0, 1]."
        )

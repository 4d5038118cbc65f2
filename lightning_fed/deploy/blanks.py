"""Records on the wire: both ends know from their own algorithm which parts a message must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.core.messages import Broadcast
from lightning_fed.core.problem import Local, LocalProblem, Solution
from lightning_fed.deploy.frames import FrameError, Spec

Plain = bool | int | float | str | None


class _Idle(Local):
    """Answers every local problem by its start, as if after steps of a given sum."""

    def __init__(self, lr_sum: float) -> None:
        self.lr_sum = lr_sum

    def answer(self, problem: LocalProblem) -> Solution:
        return Solution(problem.start, 0.0, 1, lr_sum=self.lr_sum, estimate=problem.estimate, reach=1.0)

    def gradient(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def rng(self, purpose: str) -> Generator:
        return Generator()


def blank_message(algorithm: Algorithm[Any, Any, Any], x0: Tensor, down: Broadcast, lr_sum: float = 1.0) -> Any:
    """A message as clients answer ``down``, filled with numbers that mean nothing: from a client that does nothing.

    ``lr_sum`` is the planned sum of the step sizes of a visit, which some algorithms compare with the visit's own.

    >>> from lightning_fed.algorithms import FedADMM
    >>> blank_message(FedADMM(), torch.zeros(2), Broadcast(torch.ones(2))).delta_i.shape
    torch.Size([2])
    """
    return algorithm.client_step(algorithm.init_client(x0), down, _Idle(lr_sum)).message


def parts_of(value: Any, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Plain]]:
    """The tensors and the plain values of a record, by name.

    >>> from lightning_fed.algorithms import FedLin
    >>> from lightning_fed.core.local_work import LocalWork
    >>> down = FedLin().broadcast(FedLin().init_server(torch.zeros(2)), LocalWork(0))
    >>> tensors, plain = parts_of(down)
    >>> sorted(tensors), plain
    (['g_bar', 'x_bar'], {'asking': True, 'first': True})
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Plain] = {}
    for name, own in vars(value).items():
        if isinstance(own, Tensor):
            tensors[prefix + name] = own.detach().cpu()
        elif is_dataclass(own):
            inner = parts_of(own, f"{prefix}{name}.")
            tensors, plain = {**tensors, **inner[0]}, {**plain, **inner[1]}
        elif own is None or isinstance(own, (bool, int, float, str)):
            plain[prefix + name] = own
        else:
            raise TypeError(f"{type(value).__name__}.{name} is a {type(own).__name__}, which is not sent.")
    return tensors, plain


def rebuilt(blank: Any, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], prefix: str = "") -> Any:
    """A record like ``blank`` with other parts, on its device; refuses values of another type."""
    fields: dict[str, Any] = {}
    for name, own in vars(blank).items():
        if isinstance(own, Tensor):
            fields[name] = tensors[prefix + name].to(own.device)
        elif is_dataclass(own):
            fields[name] = rebuilt(own, tensors, plain, f"{prefix}{name}.")
        elif type(value := plain.get(prefix + name)) is type(own) or own is None or value is None:
            fields[name] = value
        else:
            raise FrameError(f"{type(blank).__name__}.{name} must be a {type(own).__name__}, got {value!r}.")
    return type(blank)(**fields)


def or_empty(expected: Mapping[str, Spec], declared: Mapping[str, Spec]) -> dict[str, Spec]:
    """What is expected, where a vector may be left out: algorithms send an empty one where clients need none.

    >>> or_empty({"x": Spec("float32", (5,))}, {"x": Spec("float32", (0,))})
    {'x': Spec(dtype='float32', shape=(0,))}
    """
    return {
        name: empty if declared.get(name) == (empty := Spec(spec.dtype, (0,))) and len(spec.shape) == 1 else spec
        for name, spec in expected.items()
    }


def full_schema(down: Broadcast, x0: Tensor) -> dict[str, Spec]:
    """The tensors of a broadcast with every vector in it: those that are empty have the length of ``x0``."""
    tensors, _ = parts_of(down)
    return {name: Spec.of(x0.to(t.dtype)) if t.dim() == 1 and not len(t) else Spec.of(t) for name, t in tensors.items()}

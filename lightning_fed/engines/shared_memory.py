"""Objects full of tensors, handed from a forked process to its parent through shared memory, without a copy there."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


class Parcel:
    """Room for one object; made before the fork, filled by the child, opened by the parent.

    >>> parcel = Parcel()
    >>> label = parcel.fill({"x": torch.arange(3), "n": 1})
    >>> parcel.open(label)
    {'x': tensor([0, 1, 2]), 'n': 1}

    Tensors that both sides ``know`` already are not sent.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("lightning_fed")

    def fill(self, content: Any, known: Sequence[Tensor] = ()) -> bytes:
        """Put the tensors into shared memory; the rest is the label, by which the parcel can be opened."""
        file = io.BytesIO()
        pickler = _Pickler(file, known)
        pickler.dump(content)
        tensors = pickler.tensors[len(known) :]
        sizes = [t.numel() * t.element_size() for t in tensors]
        os.ftruncate(self._fd, max(1, sum(map(_aligned, sizes))))
        shared = torch.frombuffer(mmap.mmap(self._fd, 0), dtype=torch.uint8)
        start = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if size:
                shared[start : start + size].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
            start += _aligned(size)
        return pickle.dumps((file.getvalue(), [(t.dtype, tuple(t.shape)) for t in tensors]))

    def open(self, label: bytes, known: Sequence[Tensor] = ()) -> Any:
        """The content; its tensors stay where they are until nobody needs them."""
        stream, kinds = pickle.loads(label)
        # unlike mmap's, this map does not keep a file descriptor for as long as a tensor lives
        storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{self._fd}", True, os.fstat(self._fd).st_size)
        shared = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.close()
        tensors, start = list(known), 0
        for dtype, shape in kinds:
            size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
            tensors.append(
                shared[start : start + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
            )
            start += _aligned(size)
        return _Unpickler(io.BytesIO(stream), tensors).load()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = list(known)
        self._index = {id(tensor): i for i, tensor in enumerate(known)}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor:
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

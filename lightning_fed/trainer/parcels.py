"""Pack objects for another process of this run: tensors beside the pickle, each with memory of its own on arrival."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Parcel(NamedTuple):
    """An object, pickled, and the buffers of its tensors."""

    stream: bytes
    buffers: list[memoryview]


class _Pickler(pickle.Pickler):
    """Sends tensors as separate buffers without a copy; torch's pickling would send the whole storage of a view."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        whole = obj.detach().cpu().contiguous()
        return _tensor, (whole.view(-1).view(torch.uint8).numpy(), obj.dtype, obj.shape)


def _tensor(numbers: NDArray[np.uint8], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(numbers).view(dtype).view(shape)


def pack(content: Any) -> Parcel:
    """Pickle an object; raises what pickle and torch raise for one that cannot be sent.

    >>> parcel = pack({"x": torch.ones(2)})
    >>> [len(buffer) for buffer in parcel.buffers], unpack(parcel.stream, [bytearray(b) for b in parcel.buffers])
    ([8], {'x': tensor([1., 1.])})
    """
    stream, beside = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=beside.append).dump(content)
    return Parcel(stream.getvalue(), [each.raw() for each in beside])


def unpack(stream: bytes, buffers: list[Any]) -> Any:
    """The object of a parcel."""
    return pickle.loads(stream, buffers=buffers)


def empty_buffers(sizes: list[int]) -> list[NDArray[np.uint8]]:
    """Memory to receive buffers in: from torch, because results of its kernels may depend on alignment."""
    return [torch.empty(size, dtype=torch.uint8).numpy() for size in sizes]

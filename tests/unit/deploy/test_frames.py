"""Frames refuse everything that they do not expect, before they allocate."""

from __future__ import annotations

import json
import tracemalloc
from hashlib import sha256
from typing import Any

import pytest
import torch

from lightning_fed.deploy.frames import MAGIC, Frame, FrameError, Spec, encode, schema_of

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([], dtype=torch.float64),
    "c": torch.tensor(True),
    "d": torch.ones(3, dtype=torch.bfloat16),
}


def forged(tensors: list[Any], body: bytes = b"", header: Any = None) -> bytes:
    text = json.dumps({"header": {} if header is None else header, "tensors": tensors}).encode()
    return MAGIC + len(text).to_bytes(4, "little") + sha256(text + body).digest() + text + body


def test_tensors_come_out_as_they_went_in() -> None:
    frame = Frame.open(encode({"round": 1, "loss": float("inf")}, TENSORS))
    found = frame.tensors(schema_of(TENSORS))
    assert frame.header == {"round": 1, "loss": float("inf")}
    assert all(torch.equal(found[name], own) and found[name].dtype == own.dtype for name, own in TENSORS.items())


def test_a_tensor_of_another_layout_in_memory_is_sent_by_its_values() -> None:
    turned = TENSORS["a"].T
    assert torch.equal(Frame.open(encode({}, {"x": turned})).tensors(schema_of({"x": turned}))["x"], turned)


@pytest.mark.parametrize("at", [0, 9, 20, 60, -1])
def test_one_changed_byte_is_found(at: int) -> None:
    data = bytearray(encode({}, TENSORS))
    data[at] ^= 1
    with pytest.raises(FrameError):
        Frame.open(bytes(data))


def test_every_cut_is_found() -> None:
    data = encode({}, {"x": torch.ones(2)})
    for size in range(len(data)):
        with pytest.raises(FrameError):
            Frame.open(data[:size])


@pytest.mark.parametrize(
    "tensors",
    [
        [["x", "float32", [2**40]]],
        [["x", "float32", [2**30, 2**30, 2**30]]],
        [["x", "float32", [-1]]],
        [["x", "float32", [True]]],
        [["x", "float32", 4]],
        [["x", "object", [1]]],
        [["x", "float32", [0]], ["x", "float32", [0]]],
        [[["x"], "float32", [0]]],
        [["x", "float32"]],
        {"x": 1},
        [["x", "float32", [0] * 50]],
        [["x", "float32", [0]]] * 200_000,
    ],
    ids=lambda tensors: str(tensors)[:30],
)
def test_a_lying_header_is_refused_without_allocation(tensors: Any) -> None:
    data = forged(tensors)
    tracemalloc.start()
    with pytest.raises(FrameError):
        Frame.open(data).tensors({})
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


@pytest.mark.parametrize("header", [[], 3, "text"])
def test_a_header_that_is_no_mapping_is_refused(header: Any) -> None:
    with pytest.raises(FrameError, match="no mapping"):
        Frame.open(forged([], header=header))


def test_a_deeply_nested_header_is_refused() -> None:
    text = b'{"header":' + b"[" * 100_000 + b"]" * 100_000 + b',"tensors":[]}'
    data = MAGIC + len(text).to_bytes(4, "little") + sha256(text).digest() + text
    with pytest.raises(FrameError):
        Frame.open(data)


@pytest.mark.parametrize(
    ("expected", "named"),
    [
        ({"x": Spec("float32", (3,))}, "declared as float32 \\(2,\\)"),
        ({"x": Spec("float64", (2,))}, "expected is float64"),
        ({}, "'x' is not expected"),
        ({"x": Spec("float32", (2,)), "y": Spec("float32", (1,))}, "y is missing"),
    ],
)
def test_another_schema_than_the_receivers_is_refused(expected: Any, named: str) -> None:
    with pytest.raises(FrameError, match=named):
        Frame.open(encode({}, {"x": torch.ones(2)})).tensors(expected)


def test_pickles_are_no_frames() -> None:
    import pickle

    with pytest.raises(FrameError):
        Frame.open(pickle.dumps({"x": 1}) + b" " * 100)

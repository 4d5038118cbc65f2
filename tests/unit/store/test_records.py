"""Records hold any tensor, bit for bit, in a layout that others read."""

import pytest
import torch
from helpers.memories import plain

from lightning_fed.core.memory import Cost, Memory
from lightning_fed.store import DiskStore, Location, Record, durable, read
from lightning_fed.store.records import encode

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
ODD_IDS = [
    0, -1, 1, "1", 2**80, "", "../x", "/etc/passwd", "a\0b", "x" * 10_000, "\ud800", "\udfff\ud800", "A", "a",
    "é", "e\u0301", "CON", "\n", '"', "\\", "i:1", "server", ".", "..", " ",
]  # fmt: skip


def written(record, path):
    encoded = encode(record)
    size = durable.write(path, encoded.buffers)
    assert size == encoded.length
    return Location(path, 0, size, encoded.digest, record.client, record.round)


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_any_dtype_and_shape_is_kept(tmp_path, dtype, shape):
    tensor = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    found = read(written(Record("a", 1, {"x": tensor}, {"b": tensor}), tmp_path / "a"))
    assert bits(found.tensors["x"]) == bits(tensor)
    assert bits(found.buffers["b"]) == bits(tensor)


def test_odd_tensors_are_kept(tmp_path):
    base = torch.randn(4, 6)
    odd = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "grad": torch.ones(2, requires_grad=True),
        "inner.x_i": torch.ones(1),
        "__metadata__": torch.ones(1),
    }
    found = read(written(Record(3, 0, odd), tmp_path / "a"))
    assert {n: bits(t) for n, t in found.tensors.items()} == {
        n: bits(t.detach().resolve_conj().resolve_neg()) for n, t in odd.items()
    }
    assert all(t.data_ptr() % 64 == 0 for t in found.tensors.values())


def test_a_stateless_algorithm_has_an_empty_record(tmp_path):
    with DiskStore(tmp_path, lambda: None, build=lambda tensors, layout: None, cache_bytes=0) as store:
        store.commit(0, {"a": Memory(None, 3, {}, Cost(1, 2, 3, 4), layout=5)})
        found = store["a"]
        assert (found.state, found.visits, found.cost, found.layout) == (None, 3, Cost(1, 2, 3, 4), 5)


def test_safetensors_reads_a_record(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES if dtype not in (torch.complex64, torch.complex128)
    }
    written(Record("\ud800", 2, tensors, {"mean": torch.zeros(0, 2)}), tmp_path / "a")
    found = safetensors.load_file(tmp_path / "a")
    assert {n: bits(t) for n, t in found.items()} == {
        **{f"state/{n}": bits(t) for n, t in tensors.items()},
        "buffers/mean": bits(torch.zeros(0, 2)),
    }


def test_odd_ids_do_not_clash_and_stay_in_the_folder(tmp_path):
    folder = tmp_path / "deep" / "store"
    build = {"build": lambda tensors, layout: tensors}
    memories = {cid: Memory(None, i, {"b": torch.full((i,), float(i))}) for i, cid in enumerate(ODD_IDS)}
    with DiskStore(folder, lambda: None, **build) as store:
        store.commit(0, memories)
    with DiskStore(folder, lambda: None, **build) as store:
        assert list(store) == ODD_IDS
        for i, cid in enumerate(ODD_IDS):
            assert (store[cid].visits, len(store[cid].buffers["b"])) == (i, i)
        store.snapshot(tmp_path / "saved")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "saved"]
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["store"]


def test_large_records_of_odd_ids_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_fed.store.files.LARGE", 0)
    with DiskStore(tmp_path, lambda: None, build=lambda tensors, layout: None, cache_bytes=0) as store:
        store.commit(0, {cid: Memory(None, i) for i, cid in enumerate(ODD_IDS)})
        assert [store[cid].visits for cid in ODD_IDS] == list(range(len(ODD_IDS)))
        names = [p.name.lower() for p in (tmp_path / "records").iterdir()]
        assert len(set(names)) == len(ODD_IDS)


def test_old_layouts_are_adapted_when_they_are_read(tmp_path):
    def build(tensors, layout):
        return {name: torch.cat([t, torch.zeros(1)]) if layout == 0 else t for name, t in tensors.items()}

    from helpers.memories import State

    with DiskStore(tmp_path, lambda: None, build=build) as store:
        store.commit(0, {"a": Memory(State(torch.ones(1), torch.ones(1)), 1)})
        assert store["a"].state["x_i"].tolist() == [1.0, 0.0]
        store.commit(1, {"a": Memory(State(torch.ones(2), torch.ones(2)), 2, layout=1)})
        assert (store["a"].state["x_i"].tolist(), store["a"].layout) == ([1.0, 1.0], 1)
    assert plain(Memory(State(torch.ones(1), torch.ones(1))))[0] == 0

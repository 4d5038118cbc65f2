"""What clients remember between rounds."""

import pytest
import torch

from lightning_fed.algorithms import FedADMM, FedAvg, FedDR
from lightning_fed.core.memory import Memory, MemoryStore, tensors_of, with_tensors

X0 = torch.tensor([1.0, -1.0], dtype=torch.float64)
ADMM = FedADMM(eta=2.0)


def store_of(algorithm=ADMM, x0=X0):
    return MemoryStore(fresh=lambda: algorithm.init_client(x0))


def moved(state, by=1.0):
    return type(state)(**{name: value + by for name, value in vars(state).items()})


def test_a_client_that_never_took_part_has_the_state_of_round_zero_and_no_entry():
    store = store_of()
    memory = store["new"]
    assert torch.equal(memory.state.x_hat_i, X0)
    assert torch.equal(memory.state.z_i, torch.zeros_like(X0))
    assert (memory.visits, dict(memory.buffers)) == (0, {})
    assert (len(store), list(store)) == (0, [])


def test_others_stay_new_when_one_is_put():
    store = store_of()
    store.put({3: Memory(moved(store[3].state), visits=1)})
    assert list(store) == [3]
    assert store[3].visits == 1
    assert torch.equal(store[3].state.x_i, X0 + 1)
    assert torch.equal(store[4].state.x_i, X0)
    assert store["3"].visits == 0  # 3 and "3" are two clients


def test_putting_the_same_memories_twice_changes_nothing():
    store = store_of()
    memories = {0: Memory(moved(store[0].state), 1), "b": Memory(moved(store["b"].state, 2.0), 5)}
    store.put(memories)
    once = [store[c] for c in store]
    store.put(memories)
    assert [store[c] for c in store] == once
    assert len(store) == 2


def test_memories_are_replaced_whole():
    store = store_of()
    store.put({0: Memory(store[0].state, 1, {"mean": torch.ones(1)})})
    store.put({0: Memory(store[0].state, 2)})
    assert store[0].visits == 2
    assert dict(store[0].buffers) == {}


@pytest.mark.parametrize("algorithm", [ADMM, FedDR(), FedAvg()], ids=["FedADMM", "FedDR", "FedAvg"])
def test_a_store_reads_back_what_it_saved(algorithm):
    store, again = store_of(algorithm), store_of(algorithm)
    store.put({0: Memory(moved(store[0].state), 2, {"mean": torch.ones(1)}), "b": Memory(store["b"].state, 1)})
    again.put({9: Memory(again[9].state, 7)})
    again.load_state_dict(store.state_dict())
    assert list(again) == [0, "b"]  # what was there before is gone
    for cid in store:
        assert type(again[cid].state) is type(store[cid].state)
        assert again[cid].visits == store[cid].visits
        assert vars(again[cid].state).keys() == vars(store[cid].state).keys()
        for name, value in vars(store[cid].state).items():
            assert torch.equal(vars(again[cid].state)[name], value)
    assert torch.equal(again[0].buffers["mean"], torch.ones(1))


def test_a_saved_store_is_made_of_plain_tensors_and_numbers():
    store = store_of()
    store.put({"a": Memory(store["a"].state, 1)})
    saved = store.state_dict()["a"]
    assert saved.keys() == {"state", "visits", "buffers", "cost", "layout"}
    assert saved["state"].keys() == {"x_i", "z_i", "eta"}
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in saved["state"].values())


def test_states_are_read_back_in_the_precision_of_this_run():
    store, single = store_of(), store_of(x0=X0.float())
    store.put({0: Memory(store[0].state, 1)})
    single.load_state_dict(store.state_dict())
    state = single[0].state
    assert (state.x_i.dtype, state.z_i.dtype, state.eta.dtype) == (torch.float32, torch.float32, torch.float64)


def test_saved_tensors_are_detached():
    state = ADMM.init_client(X0.clone().requires_grad_())
    assert not tensors_of(state)["x_i"].requires_grad


def test_another_algorithms_memory_is_refused():
    store, other = store_of(), store_of(FedDR())
    store.put({0: Memory(store[0].state, 1)})
    wanted = r"ClientState holds \['x_i', 'y_i'\], but the saved state has \['eta', 'x_i', 'z_i'\]"
    with pytest.raises(ValueError, match=wanted):
        other.load_state_dict(store.state_dict())


def test_a_memory_of_another_size_is_refused_and_leaves_the_store_as_it_was():
    store, other = store_of(), store_of(x0=torch.zeros(3))
    store.put({0: Memory(store[0].state, 1)})
    other.put({5: Memory(other[5].state, 1)})
    with pytest.raises(ValueError, match=r"ClientState\.x_i has \(3,\) entries, saved: \(2,\)"):
        other.load_state_dict(store.state_dict())
    assert list(other) == [5]


def test_server_states_go_the_same_way():
    server = ADMM.init_server(X0.float())
    again = with_tensors(server, tensors_of(moved(server)))
    assert type(again) is type(server)
    assert (again.x_bar.dtype, again.x_tilde.dtype) == (torch.float32, torch.float64)
    assert torch.equal(again.x_tilde, X0 + 1)

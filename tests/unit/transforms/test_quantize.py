"""What may happen to a message: quantisation, written once more from its definition, and its costs."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer, x_of
from helpers.problems import close, golden, identical, random_clients
from torch import Tensor

from lightning_fed import FederatedServer, GradientDescent, simulate
from lightning_fed.algorithms import Compressed, FedADMM, FedAvg, FedDyn, FedLin, FedPAQ, FedSplit, Scaffold
from lightning_fed.core import hyper_parameters
from lightning_fed.core.layout import Layout
from lightning_fed.core.randomness import torch_generator
from lightning_fed.transforms import Clip, Compose, Quantize, TopK

LAYOUT = Layout(("a", "empty", "b", "scalar"), ((3, 4), (0, 2), (7,), ()), torch.float64)
BLOCKS = [slice(0, 12), slice(12, 19), slice(19, 20)]
PER = {"vector": [slice(0, 20)], "tensor": BLOCKS}


def vector(seed: int = 0) -> Tensor:
    v = torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v[:12] *= 100.0
    v[5] = 0.0
    return v


def draws(quantize: Quantize, v: Tensor, count: int = 4000) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.stack([quantize(v, rng).value for _ in range(count)])


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("levels", [1, 4, 16])
def test_entries_are_multiples_of_the_norm_of_their_block_and_right_on_average(per: str, levels: int) -> None:
    v, quantize = vector(), Quantize(levels, per).bind(LAYOUT)
    many = draws(quantize, v)
    for block in PER[per]:
        part, norm = v[block], v[block].norm()
        a = part.abs() * levels / norm
        low = a.floor()
        ratio = many[:, block].abs() * levels / norm
        assert torch.logical_or((ratio - low).abs() < 1e-9, (ratio - low - 1).abs() < 1e-9).all()
        assert ((many[:, block].sign() == part.sign()) | (many[:, block] == 0)).all()
        spread = norm / levels * ((a - low) * (1 - a + low)).sqrt()  # of one draw: a coin between two levels
        assert ((many[:, block].mean(0) - part).abs() <= 4.5 * spread / math.sqrt(len(many)) + 1e-12).all()
        variance = (many[:, block] - part).square().sum(1).mean()
        expected = spread.square().sum()
        assert variance == pytest.approx(float(expected), rel=0.15, abs=1e-12)
        bound = min(part.numel() / levels**2, math.sqrt(part.numel()) / levels) * float(norm) ** 2
        assert float(variance) <= bound + 1e-12


def test_the_published_variances_are_met() -> None:
    v = torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for levels, bound in {1: 7.07, 4: 1.77, 16: 0.195}.items():
        share = float((draws(Quantize(levels), v) - v).square().sum(1).mean() / v.square().sum())
        assert share <= bound
        assert share > bound / 10


def test_a_norm_for_every_tensor_makes_small_ones_precise() -> None:
    v = vector()
    together, apart = (draws(Quantize(4, per).bind(LAYOUT), v)[:, 12:] for per in PER)
    assert (apart - v[12:]).square().mean() < 1e-3 * (together - v[12:]).square().mean()


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (15, 5), (16, 6)])
def test_every_bit_is_counted(levels: int, bits: int) -> None:
    v, rng = vector(), torch.Generator()
    assert Quantize(levels)(v, rng).bits == 32 + 20 * bits
    assert Quantize(levels, per="tensor").bind(LAYOUT)(v, rng).bits == 3 * 32 + 20 * bits  # nothing for the empty one


def test_one_tensor_is_the_whole_vector() -> None:
    alone = Layout(("w",), ((4, 5),), torch.float64)
    for v in (vector(), torch.zeros(20, dtype=torch.float64)):
        whole, tensor = (
            q(v, torch.Generator().manual_seed(2)) for q in (Quantize(4), Quantize(4, "tensor").bind(alone))
        )
        assert torch.equal(whole.value, tensor.value)
        assert whole.bits == tensor.bits
    v = torch.cat([torch.zeros(12), torch.ones(8)]).double()
    assert torch.equal(Quantize(1, "tensor").bind(LAYOUT)(v, torch.Generator()).value[:12], torch.zeros(12).double())


def test_bound_or_not_transforms_compare_hash_print_and_pickle_alike() -> None:
    for free in (Quantize(4, "tensor"), Compose([Clip(3.0), Quantize(4, "tensor")]), TopK(2)):
        bound = free.bind(LAYOUT)
        assert bound == free
        assert hash(bound) == hash(free)
        assert repr(bound) == repr(free)
        assert hyper_parameters(bound) == hyper_parameters(free)
        sent = [q(vector(), torch.Generator().manual_seed(5)).value for q in (bound, pickle.loads(pickle.dumps(bound)))]
        assert torch.equal(*sent)


def test_what_cannot_be_quantised_by_tensor_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"needs the module's parameters.*bound by FederatedServer; in simulate use bind"
    ):
        Quantize(4, "tensor")(vector(), torch.Generator())
    with pytest.raises(
        ValueError, match=r'bound to parameters with 20 entries, but the message has 3\. Use per="vector"'
    ):
        Quantize(4, "tensor").bind(LAYOUT)(torch.ones(3), torch.Generator())
    for owner in (Quantize, FedPAQ):
        with pytest.raises(ValueError, match=rf"{owner.__name__}\.per must be one of vector, tensor; got 'row'\."):
            owner(per="row")


def test_fedpaq_averages_quantised_changes_by_tensor() -> None:
    clients, x0 = random_clients(1, n=3, d=5)
    layout = Layout(("a", "b"), ((3,), (2,)), torch.float64)
    history = simulate(
        FedPAQ(levels=2, per="tensor").bind(layout), clients, x0, rounds=3, solver=GradientDescent(2, 0.05), seed=4
    )
    x = x0
    for k in range(3):
        sent = []
        for i, f in enumerate(clients):
            y = x
            for _ in range(2):
                y = y - 0.05 * f.grad(y)
            delta, coins = y - x, torch.rand(5, generator=torch_generator(4, k, i, "quantize"), dtype=torch.float64)
            for block in (slice(0, 3), slice(3, 5)):
                a = 2 * delta[block].abs() / delta[block].norm()
                up = (coins[block] < a - a.floor()).double()
                delta[block] = delta[block].norm() * delta[block].sign() * (a.floor() + up) / 2
            sent.append(delta)
        x = x + sum(sent) / 3
        close(history.server[k + 1].x_bar, x, 1e-12)


def test_without_levels_fedpaq_is_fedavg() -> None:
    clients, x0 = golden((5, 3, 2))
    how = {"rounds": 5, "solver": GradientDescent(3, 0.1)}
    paq = simulate(FedPAQ(levels=None, per="tensor"), clients, x0, **how)
    avg = simulate(FedAvg(weights="uniform"), clients, x0, **how)
    assert identical(paq.server, avg.server)
    whole = simulate(Compressed(FedAvg(weights="uniform"), TopK(2)), clients, x0, **how)  # which keeps everything
    assert identical(whole.server, avg.server)


@pytest.mark.filterwarnings("ignore:.* adds noise")
@pytest.mark.parametrize(
    "algorithm",
    [FedPAQ(levels=3, per="tensor"), Compressed(FedADMM(), Compose([Clip(100.0), Quantize(3, per="tensor")]))],
    ids=lambda a: type(a).__name__,
)
def test_a_fit_binds_the_quantiser_to_the_modules_tensors(algorithm: FedPAQ | Compressed) -> None:
    server, module = FederatedServer(algorithm, clients_per_round=3, local_steps=2, evaluate_every=0), Net()
    before = x_of(module).clone()
    quiet_trainer(server, 2, limit_val_batches=0).fit(module, datamodule=classification())
    scalars = 6 * 8 + 8 + 8 * 3 + 3  # in four tensors
    assert server.federation is not None
    assert server.federation.bytes_up == 2 * 3 * math.ceil((4 * 32 + 3 * scalars) / 8)
    assert server.federation.bytes_down == 2 * 3 * 4 * scalars
    assert not torch.equal(x_of(module), before)


@pytest.mark.parametrize(
    ("algorithm", "warns"),
    [
        (Compressed(FedADMM(), Quantize(3)), True),  # 27 parameters: sqrt(27) / 3 > 1
        (Compressed(FedADMM(), Compose([Clip(1.0), Quantize(3)])), True),
        (Compressed(FedAvg(), Quantize(3), feedback=True), True),
        (Compressed(FedAvg(), Quantize(3)), False),
        (Compressed(FedADMM(), Quantize(6)), False),
        (Compressed(FedADMM(), TopK(1)), False),
    ],
    ids=repr,
)
def test_noise_that_memory_would_let_grow_is_warned_of(algorithm: Compressed, warns: bool) -> None:
    layout = Layout.of(torch.nn.Linear(8, 3))
    assert layout.numel == 27
    if warns:
        with pytest.warns(UserWarning, match=r"Quantize\(levels=3.* more levels than the square root .* 27"):
            algorithm.bind(layout)
    else:
        algorithm.bind(layout)


def test_the_bound_of_the_noise_holds() -> None:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(50, generator=g, dtype=torch.float64)
    for levels in (2, 8, 64):
        sent = torch.stack([Quantize(levels)(v, g).value for _ in range(400)])
        seen = float((sent - v).square().sum(1).mean() / v.square().sum())
        assert seen <= 1.1 * Quantize(levels).noise(50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size", [1, 1000, 1_000_000])
def test_no_message_is_longer_than_it_is_clipped_to(size: int, scale: float, dtype: torch.dtype) -> None:
    v = (torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * scale).to(dtype)
    for norm in (1.0, 0.1, 1e-3):
        sent = Clip(norm)(v, torch.Generator()).value
        assert sent.dtype == dtype
        assert float(sent.double().norm()) <= norm
        assert float(sent.double().norm()) >= min(norm, float(v.double().norm())) * (1 - 0.02)


def test_a_message_that_overflows_in_float64_is_shortened() -> None:
    sent = Clip(2.0)(torch.tensor([1e300, -1e300], dtype=torch.float64), torch.Generator()).value
    assert torch.allclose(sent, torch.tensor([2**0.5, -(2**0.5)], dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_message_that_is_not_finite_is_sent_as_zero(bad: float) -> None:
    v = torch.tensor([1.0, bad, 0.5])
    assert torch.equal(Clip(9.0)(v, torch.Generator()).value, torch.zeros(3))
    assert v[0] == 1.0


def test_feedback_is_refused_where_it_would_count_twice_or_mix_messages() -> None:
    for algorithm in (FedADMM(), Scaffold(), FedDyn(), FedSplit()):
        with pytest.raises(ValueError, match="would count twice"):
            Compressed(algorithm, TopK(1), feedback=True)
    with pytest.raises(ValueError, match="would mix the unsent parts"):
        Compressed(FedLin(), TopK(1), feedback=True)

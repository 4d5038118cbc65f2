"""Estimates of L against closed forms, and without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.bowls import SPECTRA, Bowl, Slope, bowls, symmetric
from helpers.evaluated import Counting, ManualValidated, Metrics, Noisy
from helpers.modules import Net, classification, quiet_trainer, x_of
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.core.layout import Layout
from lightning_fed.core.randomness import torch_generator
from lightning_fed.evaluation.curvature import Curvature, client_curvature, largest, largest_quotient


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class OnceBowl(Bowl):
    """Has no second derivative that autograd could tell."""

    def value(self, x: Tensor, A: Tensor, b: Tensor) -> Tensor:
        return super().value(_Once.apply(x), A, b)


class Probe(FederatedCallback):
    """Measures the curvature of every client before round 0 and keeps the state of the module around it."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs, self.found, self.states = kwargs, [], []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layout = Layout.of(pl_module)
        for cid in trainer.datamodule.client_ids:
            self.states.append(_state(pl_module))
            self.found.append(client_curvature(trainer, layout, cid, torch_generator(0, cid), **self.kwargs))
        self.states.append(_state(pl_module))


def _state(module: pl.LightningModule) -> list[Any]:
    tensors = [t.clone() for t in module.state_dict().values()]
    grads = [p.grad is None for p in module.parameters()]
    return [*tensors, torch.get_rng_state(), torch.tensor(grads), torch.tensor([m.training for m in module.modules()])]


def probed(module: pl.LightningModule, data: FederatedDataModule, **kwargs: Any) -> list[Curvature]:
    probe = Probe(**kwargs)
    server = FederatedServer(FedAvg(), local_steps=1, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[probe], limit_val_batches=0).fit(module, datamodule=data)
    for state in probe.states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(probe.states[0], state, strict=True))
    return probe.found


def test_power_iteration_finds_the_largest_eigenvalue_of_either_sign() -> None:
    found = probed(Bowl(), bowls(*SPECTRA.values()), iterations=2000, tolerance=1e-14, lowest=True)
    for curvature, values in zip(found, SPECTRA.values(), strict=True):
        assert abs(curvature.L / max(map(abs, values)) - 1) < 1e-6
        assert curvature.lowest == pytest.approx(min(values), abs=1e-5)
        assert curvature.method == "hessian"
    rough = probed(Bowl(), bowls(*SPECTRA.values()))
    for curvature, values in zip(rough, SPECTRA.values(), strict=True):
        assert 0.9 * max(map(abs, values)) < curvature.L <= max(map(abs, values)) * (1 + 1e-12)
        assert curvature.products <= 20


def test_without_a_second_derivative_gradients_are_compared() -> None:
    found = probed(OnceBowl(), bowls(*SPECTRA.values()), iterations=300)
    for curvature, values in zip(found, SPECTRA.values(), strict=True):
        assert abs(curvature.L / max(map(abs, values)) - 1) < 1e-5
        assert curvature.method == "differences"
        assert curvature.lowest != curvature.lowest


def test_the_hessian_of_a_network_is_that_of_autograd() -> None:
    data, module = classification(2), Net(dropout=0.4).double()
    for split in data.splits.values():
        for dataset in split.values():
            dataset.tensors = (dataset.tensors[0].double(), dataset.tensors[1])
    x0 = x_of(module)
    found = probed(module, data, iterations=2000, tolerance=1e-13, lowest=True)
    reference = Net(dropout=0.4).double().eval()
    names = [name for name, _ in reference.named_parameters()]
    for cid, curvature in zip(data.client_ids, found, strict=True):
        inputs, labels = data.client_dataset(cid).tensors

        def loss(x: Tensor, inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            parts = x.split([p.numel() for p in reference.parameters()])
            shaped = {n: t.view_as(p) for n, t, p in zip(names, parts, reference.parameters(), strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(reference, shaped, (inputs,)), labels)

        values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, x0))
        assert abs(curvature.L / float(values.abs().max()) - 1) < 1e-5
        assert curvature.lowest == pytest.approx(float(values.min()), abs=1e-4)


@pytest.mark.parametrize("make", [Metrics, Counting, Noisy, ManualValidated, lambda: Net(norm=True, dropout=0.5)])
def test_nothing_is_changed_by_measuring(make: Any) -> None:
    def found() -> list[tuple[float, int]]:
        torch.manual_seed(3)
        return [(curvature.L, curvature.products) for curvature in probed(make(), classification(drop_last=True))]

    assert found() == found()
    assert min(found())[0] > 0


def test_a_linear_loss_has_no_curvature() -> None:
    assert [curvature.L for curvature in probed(Slope(), bowls(SPECTRA["convex"]))] == [0.0]


def test_the_start_decides_nothing_in_the_limit_and_estimates_never_exceed_the_truth() -> None:
    H = symmetric(SPECTRA["saddle"])
    for seed in range(5):
        v = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        by_length = [largest(H.mv, v, k, 0.0)[0] for k in range(1, 12)]
        assert by_length == sorted(by_length)
        assert by_length[-1] <= 5.0 * (1 + 1e-12)
        assert largest(H.mv, v, 500, 1e-15)[0] == pytest.approx(5.0, rel=1e-9)
        assert largest_quotient(H.mv, v, v, 200, radius=0.5)[0] == pytest.approx(5.0, rel=1e-9)

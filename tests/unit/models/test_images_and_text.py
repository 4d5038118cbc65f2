"""Models for images and text: layer by layer, and the same however clients are asked."""

from __future__ import annotations

import pytest
import torch
from helpers.modules import quiet_trainer, x_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.models import (
    CelebaCNN,
    CifarCNN,
    LogisticRegression,
    ResNet18GN,
    Sent140LSTM,
    ShakespeareLSTM,
)
from lightning_fed.models.classifier import Classifier


def counts(module: nn.Module) -> list[int]:
    """Numbers of trained parameters of the layers that have some."""
    leaves = (layer for layer in module.modules() if not list(layer.children()))
    return [count for layer in leaves if (count := sum(p.numel() for p in layer.parameters() if p.requires_grad))]


def test_the_networks_have_the_layers_of_their_papers() -> None:
    assert counts(CifarCNN()) == [4_864, 102_464, 614_784, 73_920, 1_930]
    assert counts(CelebaCNN()) == [896, 64, 9_248, 64, 9_248, 64, 9_248, 64, 2_306]
    assert counts(ShakespeareLSTM()) == [640, 796_672, 20_560]  # as LEAF's, of TensorFlow
    assert counts(Sent140LSTM(words=400)) == [40_100, 160_800, 12_928, 258]
    assert counts(LogisticRegression(784, 10)) == [7_850]


def test_lstms_begin_as_in_tensorflow() -> None:
    lstm = ShakespeareLSTM().lstm
    for i, inputs in enumerate((8, 256)):
        weights = torch.cat([getattr(lstm, f"weight_{of}_l{i}").flatten() for of in ("ih", "hh")])
        bound = (6 / (inputs + 256 + 1024)) ** 0.5
        assert 0.99 * bound < weights.abs().max() <= bound
        assert getattr(lstm, f"bias_ih_l{i}").view(4, 256).mean(1).tolist() == [
            0,
            1,
            0,
            0,
        ]  # gates: in, forget, cell, out
        assert not getattr(lstm, f"bias_hh_l{i}").any()


@pytest.mark.parametrize(("stem", "classes", "wanted"), [("cifar", 10, 11_173_962), ("imagenet", 1000, 11_689_512)])
def test_the_resnet_has_as_many_parameters_as_torchvisions_and_no_batch_norm(
    stem: str, classes: int, wanted: int
) -> None:
    model = ResNet18GN(classes, stem=stem)
    assert sum(p.numel() for p in model.parameters()) == wanted
    norms = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm | nn.BatchNorm2d)]
    assert [(type(norm), norm.num_groups) for norm in norms] == [(nn.GroupNorm, 2)] * 20
    assert not list(model.network.buffers())
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, classes)


def test_an_image_of_the_resnet_does_not_depend_on_its_batch() -> None:
    model, images = ResNet18GN().double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[:1], model(images[:1]))
    leaf = CelebaCNN(image_size=16).double().eval()  # LEAF's batch statistics do
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        assert not torch.allclose(leaf(images)[:1], leaf(images[:1]))
        grouped = CelebaCNN(image_size=16, norm="group").double()
        torch.testing.assert_close(grouped(images)[:1], grouped(images[:1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet18GN(groups=3), "ResNet18GN.groups must divide 64, .* got 3"),
        (lambda: ResNet18GN(stem="mnist"), "ResNet18GN.stem must be one of cifar, imagenet; got 'mnist'"),
        (lambda: CifarCNN(image_size=8), "CifarCNN.image_size must be a whole number >= 16, got 8"),
        (lambda: CelebaCNN(norm="layer"), "CelebaCNN.norm must be one of batch, group"),
        (lambda: ShakespeareLSTM(hidden=0), "ShakespeareLSTM.hidden must be a whole number >= 1"),
        (lambda: LogisticRegression(lr=-1.0), "LogisticRegression.lr must be positive"),
    ],
)
def test_bad_arguments_are_refused_at_once(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def images(size: int) -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    parts = [(torch.rand(n, 3, size, size, generator=g).double(), torch.randint(10, (n,), generator=g)) for n in (3, 4)]
    return FederatedDataModule([TensorDataset(*part) for part in parts], batch_size=2)


def trained(make: type[Classifier], data: FederatedDataModule, **settings: object) -> Tensor:
    torch.manual_seed(0)
    module = make(lr=0.01, log_train=False).double()
    server = FederatedServer(FedADMM(eta=1.0), local_steps=1, evaluate_every=0, **settings)
    quiet_trainer(server, 1).fit(module, datamodule=data)
    return x_of(module)


class SmallCNN(CifarCNN):
    stackable = True

    def __init__(self, lr: float, log_train: bool) -> None:
        super().__init__(lr=lr, log_train=log_train, image_size=16)


class Slope(LogisticRegression):
    stackable = True

    def __init__(self, lr: float, log_train: bool) -> None:
        super().__init__(3 * 8 * 8, lr=lr, log_train=log_train)


@pytest.mark.parametrize(
    ("make", "size"), [pytest.param(ResNet18GN, 8, marks=pytest.mark.slow), (SmallCNN, 16), (Slope, 8)]
)
def test_stacked_clients_train_as_those_one_by_one(make: type[Classifier], size: int) -> None:
    """What the classes declare: steps are functions of batch and parameters, and stacks compute them."""
    one_by_one = trained(make, images(size), engine="sequential")
    stacked = trained(make, images(size), engine="vectorized", compile=False)
    torch.testing.assert_close(stacked, one_by_one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [(ShakespeareLSTM(characters=20, hidden=16), 20), (Sent140LSTM(words=30, hidden=8), 31)],
)
def test_text_is_learnt_one_client_after_another(model: Classifier, tokens: int) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(tokens, (12, 5), generator=g)
    data = FederatedDataModule([TensorDataset(rows, rows[:, -1] % 2)] * 2, test=[TensorDataset(rows, rows[:, -1] % 2)])
    before = x_of(model).clone()
    trainer = quiet_trainer(FederatedServer(FedADMM(), local_steps=1), 1)
    trainer.fit(model, datamodule=data)
    assert not torch.equal(x_of(model), before)
    assert "federated/test_accuracy" in trainer.callback_metrics

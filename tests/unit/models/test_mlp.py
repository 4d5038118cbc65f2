"""An ordinary LightningModule."""

import math

import pytest
import torch
from helpers.modules import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.models import MLP


def loader(dtype=torch.float32):
    x = torch.randn(12, 60, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return DataLoader(TensorDataset(x, torch.arange(12) % 10), batch_size=5)


def test_the_papers_perceptron_has_2282_parameters():
    assert sum(p.numel() for p in MLP().parameters()) == 2282
    assert [tuple(p.shape) for p in MLP().parameters()] == [(32, 60), (32,), (10, 32), (10,)]


def test_weights_are_glorot_uniform_and_biases_zero():
    for layer in MLP((300, 200, 100)).layers:
        if isinstance(layer, nn.Linear):
            bound = math.sqrt(6 / (layer.in_features + layer.out_features))
            assert 0.99 * bound < layer.weight.abs().max() <= bound
            assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
            assert not layer.bias.any()


@pytest.mark.parametrize(("activation", "kind"), [("relu", nn.ReLU), ("tanh", nn.Tanh)])
def test_activations_stand_between_layers_only(activation, kind):
    kinds = [type(layer) for layer in MLP((4, 3, 3, 2), activation=activation).layers]
    assert kinds == [nn.Linear, kind, nn.Linear, kind, nn.Linear]


def test_images_are_flattened():
    assert MLP((12, 3))(torch.zeros(5, 3, 2, 2)).shape == (5, 3)


def test_the_optimiser_is_plain_sgd():
    group = MLP(lr=0.3).configure_optimizers().param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0, 0)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_a_plain_trainer_logs_loss_and_accuracy_of_all_samples(precision, dtype):
    trainer, model = quiet_trainer(rounds=1, precision=precision), MLP()
    trainer.fit(model, loader(dtype), loader(dtype))
    assert {"train_loss", "train_acc", "val_loss", "val_acc"} <= set(trainer.callback_metrics)
    assert model.layers[0].weight.dtype == dtype
    logged = trainer.test(model, loader(dtype), verbose=False)[0]
    x, y = loader(dtype).dataset.tensors
    with torch.no_grad():
        logits = model(x)
    assert logged["test_loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-6)
    assert logged["test_acc"] == pytest.approx((logits.argmax(1) == y).float().mean().item())


def test_metrics_are_no_part_of_the_model():
    names = set(MLP().state_dict())
    assert names == {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (60,)}, r"MLP.sizes must be two or more whole numbers >= 1, got \(60,\)"),
        ({"sizes": (60, 0, 10)}, "MLP.sizes"),
        ({"lr": 0.0}, r"MLP.lr must be positive, got 0.0"),
        ({"activation": "gelu"}, r"MLP.activation must be one of relu, tanh; got 'gelu'"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLP(**arguments)

"""Ordinary LightningModules, without code for federations."""

from lightning_fed.models.celeba_cnn import CelebaCNN
from lightning_fed.models.cifar_cnn import CifarCNN
from lightning_fed.models.femnist_cnn import FemnistCNN
from lightning_fed.models.logistic_regression import LogisticRegression
from lightning_fed.models.lstm import Sent140LSTM, ShakespeareLSTM
from lightning_fed.models.mlp import MLP
from lightning_fed.models.resnet import ResNet18GN

__all__ = [
    "MLP",
    "CelebaCNN",
    "CifarCNN",
    "FemnistCNN",
    "LogisticRegression",
    "ResNet18GN",
    "Sent140LSTM",
    "ShakespeareLSTM",
]

"""LEAF's recurrent networks for text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_fed.core.validation import whole
from lightning_fed.models.classifier import Classifier, glorot


def as_in_tensorflow(module: nn.Module) -> None:
    """Let weights of all layers begin as in TensorFlow: Glorot-uniform, biases zero, and one at the forget gates."""
    glorot(module)
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            nn.init.xavier_uniform_(layer.weight)
        if isinstance(layer, nn.LSTM):
            for i in range(layer.num_layers):
                _begin_lstm(
                    *(getattr(layer, f"{name}_l{i}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
                )


def _begin_lstm(of_input: Tensor, of_hidden: Tensor, bias: Tensor, second: Tensor) -> None:
    gates, hidden = of_hidden.shape
    bound = math.sqrt(6 / (of_input.shape[1] + hidden + gates))  # TensorFlow's kernel is one matrix
    for weight in (of_input, of_hidden):
        nn.init.uniform_(weight, -bound, bound)
    nn.init.zeros_(bias)
    with torch.no_grad():
        bias[hidden : 2 * hidden] = 1
    nn.init.zeros_(second).requires_grad_(False)


class ShakespeareLSTM(Classifier):
    """Predict the next character: embeddings of 8, two LSTM layers of 256, one linear layer on the last output.

    A sample is a row of character numbers (80 in LEAF) and the number of the character that follows. Weights begin as
    TensorFlow's defaults make them in LEAF. torch's LSTM has two biases where TensorFlow's has one; the second is
    frozen at zero, as two would move twice as fast.

    Args:
        characters: size of the alphabet.
        lr: step size of SGD.
        embedding, hidden: sizes of an embedding and of an LSTM layer.
        log_train: log loss and accuracy of training batches.

    >>> sum(p.numel() for p in ShakespeareLSTM().parameters() if p.requires_grad)
    817872

    Reference: arXiv:1812.01097.
    """

    def __init__(
        self, characters: int = 80, lr: float = 0.8, embedding: int = 8, hidden: int = 256, log_train: bool = True
    ) -> None:
        super().__init__(characters, lr, log_train)
        self.save_hyperparameters()
        self.characters, self.embedding, self.hidden = characters, embedding, hidden
        for name in ("characters", "embedding", "hidden"):
            whole(self, name, 1)
        self.embed = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, characters)
        as_in_tensorflow(self)

    def forward(self, x: Tensor) -> Tensor:
        """One score per character for each row of characters."""
        logits: Tensor = self.head(self.lstm(self.embed(x))[0][:, -1])
        return logits


class Sent140LSTM(Classifier):
    """Tell the sentiment of a tweet: embeddings, two LSTM layers of 100, linear layers of 128 and 2.

    A sample is a row of word numbers (25 in LEAF), where ``words`` stands for an unknown word, and a class. As in LEAF,
    embeddings are trained and there is no function between the two linear layers; weights as in
    :class:`ShakespeareLSTM`.

    Args:
        words: size of the vocabulary; GloVe's, which LEAF takes, has 400,000.
        lr: step size of SGD.
        classes: number of classes.
        hidden: size of an embedding and of an LSTM layer.
        log_train: log loss and accuracy of training batches.

    >>> sum(p.numel() for p in Sent140LSTM(words=1000).parameters() if p.requires_grad)
    274086

    Reference: arXiv:1812.01097.
    """

    def __init__(
        self, words: int = 10_000, lr: float = 0.1, classes: int = 2, hidden: int = 100, log_train: bool = True
    ) -> None:
        super().__init__(classes, lr, log_train)
        self.save_hyperparameters()
        self.words, self.hidden = words, hidden
        whole(self, "words", 1)
        whole(self, "hidden", 1)
        self.embed = nn.Embedding(words + 1, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, 128), nn.Linear(128, classes))
        as_in_tensorflow(self)

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for each row of words."""
        logits: Tensor = self.head(self.lstm(self.embed(x))[0][:, -1])
        return logits

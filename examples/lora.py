"""LoRA: send the adapters only
===============================

Fine-tune a small transformer in a federation with low-rank adapters (LoRA): only the adapters are sent.

The model is made from a config and the texts are drawn here, so that the example needs no download: a public text
teaches the model four topics, then 12 clients, each with its own favourite topics, write about them in new words.

    pip install peft transformers
    python examples/lora.py [FIGURE.png]
"""

# sphinx_gallery_thumbnail_path = "lora.png"

from __future__ import annotations

import copy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.partition import Dirichlet

TOPICS, WORDS, LENGTH = 4, 200, 24
ROUNDS, COHORT = 12, 6
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


class Reader(pl.LightningModule):
    """A text classifier of transformers, as for a plain Trainer; it trains what is not frozen."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, topic = batch
        loss: Tensor = self.model(input_ids=words, labels=topic).loss
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, topic = batch
        answer = self.model(input_ids=words, labels=topic)
        self.log("val_acc", (answer.logits.argmax(1) == topic).float().mean())
        loss: Tensor = answer.loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def texts(samples: int, new_words: float, seed: int) -> TensorDataset:
    """Texts by topic: one word in five is of the topic, others are of none; some topic words are new."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (samples,), generator=g)
    words = torch.randint(100, WORDS, (samples, LENGTH), generator=g)
    of_topic = 10 * topic[:, None] + torch.randint(10, (samples, LENGTH), generator=g)
    of_topic += 50 * (torch.rand(samples, LENGTH, generator=g) < new_words)
    return TensorDataset(torch.where(torch.rand(samples, LENGTH, generator=g) < 0.2, of_topic, words), topic)


def pretrained() -> nn.Module:
    """A model that has read public texts, in which the new words are rare."""
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=TOPICS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    reader = Reader(BertForSequenceClassification(config), lr=2e-3)
    public = DataLoader(texts(2000, new_words=0.03, seed=1), batch_size=50, shuffle=True)
    pl.Trainer(max_epochs=3, limit_val_batches=0, **QUIET).fit(reader, public, public)
    return reader.model


def with_adapters(model: nn.Module) -> nn.Module:
    """Freeze the model and add adapters of rank 4 to its attention; the last layer stays trainable."""
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(copy.deepcopy(model), lora)


def federate(model: nn.Module, lr: float, data: FederatedDataModule) -> tuple[list[float], list[float]]:
    """Accuracy by round, and kilobytes that were sent in both directions together until then."""
    server = FederatedServer(FedADMM(eta=0.1, mean="active"), clients_per_round=COHORT, local_epochs=2)
    trainer = pl.Trainer(max_epochs=ROUNDS, callbacks=[server], **QUIET)
    trainer.fit(Reader(model, lr), datamodule=data)
    sent = [(row["federated/bytes_down"] + row["federated/bytes_up"]) / 1000 for row in server.history]
    return [row["val_acc"] for row in server.history], sent


def main() -> None:
    pl.seed_everything(0, verbose=False)
    base = pretrained()
    data = FederatedDataModule.from_dataset(
        texts(2400, new_words=0.9, seed=2),
        Dirichlet(clients=12, alpha=0.3, min_examples=20),
        test_fraction=0.2,
        batch_size=20,
    )
    (before,) = pl.Trainer(**QUIET).validate(Reader(base, 0.0), datamodule=data, verbose=False)
    print(f"{'before':22} accuracy {before['val_acc']:.3f}")
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, model, lr in (
        ("LoRA", with_adapters(base), 5e-3),
        ("all parameters", copy.deepcopy(base), 1e-3),
    ):
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        accuracy, sent = federate(model, lr, data)
        print(f"{name:22} accuracy {accuracy[-1]:.3f}, {trained:6} parameters, {sent[-1] / ROUNDS:8.1f} kB a round")
        axes.semilogx(sent, accuracy, "o-", label=f"{name}: {trained:,} parameters")
    axes.set(xlabel="kilobytes received and sent", ylabel="accuracy on held-out texts", title=f"{ROUNDS} rounds")
    axes.legend()
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lora.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"Figure: {path}")


if __name__ == "__main__":
    main()

"""PEFT's adapters in a federation: the frozen model is neither sent, nor kept by clients, nor changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*`max_epochs`")


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(200, 300), nn.Linear(300, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh())


class Adapted(pl.LightningModule):
    def __init__(self, rank: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        config = peft.LoraConfig(r=rank, target_modules=["first"], modules_to_save=["head"], lora_dropout=dropout)
        self.model = peft.get_peft_model(Backbone(), config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data() -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(48, 200, generator=g)
    parts = torch.arange(48).split(12)
    return FederatedDataModule([TensorDataset(x[i], (x[i, 0] > 0).long()) for i in parts], batch_size=4)


def fit(
    folder: Path, rounds: int, ckpt_path: Any = None, kind: type[Adapted] = Adapted, **settings: Any
) -> tuple[Adapted, pl.Trainer, Path]:
    pl.seed_everything(0, verbose=False)
    module, server = kind(), FederatedServer(FedADMM(eta=0.1), clients_per_round=2, local_epochs=1, **settings)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(default_root_dir=folder, max_epochs=rounds, callbacks=[server], **options)
    trainer.fit(module, datamodule=data(), ckpt_path=ckpt_path)
    saved = folder / f"{rounds}.ckpt"
    trainer.save_checkpoint(saved)
    return module, trainer, saved


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def test_only_trained_parameters_are_sent_and_the_frozen_ones_stay(tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    first = Adapted()
    module, trainer, saved = fit(tmp_path, rounds=3)
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    assert len(trained(module)) == 4  # A, B, and the weight and bias of the head
    assert all(torch.equal(p, dict(first.named_parameters())[name]) for name, p in frozen.items())
    assert any(not torch.equal(p, trained(first)[name]) for name, p in trained(module).items())
    sent = 4 * sum(p.numel() for p in trained(module).values())
    logged = trainer.callback_metrics
    assert float(logged["federated/bytes_up"]) == float(logged["federated/bytes_down"]) == 3 * 2 * sent
    # two vectors per client, the server's two, Adam's two; the frozen model is there once
    model = 4 * sum(p.numel() for p in module.parameters())
    assert saved.stat().st_size < model + 14 * sent + 60_000


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, _, _ = fit(tmp_path / "whole", rounds=4)
    _, _, saved = fit(tmp_path / "half", rounds=2)
    resumed, _, _ = fit(tmp_path / "half", rounds=4, ckpt_path=saved)
    assert all(torch.equal(p, trained(resumed)[name]) for name, p in trained(whole).items())


def test_adapters_are_saved_loaded_and_merged_with_peft(tmp_path: Path) -> None:
    module, _, _ = fit(tmp_path, rounds=2)
    module.model.save_pretrained(tmp_path / "adapters")
    pl.seed_everything(0, verbose=False)
    loaded = peft.PeftModel.from_pretrained(Backbone(), tmp_path / "adapters").eval()
    x = torch.randn(3, 200)
    with torch.no_grad():
        wanted = module.model.eval()(x)
        assert torch.equal(loaded(x), wanted)
        torch.testing.assert_close(module.model.merge_and_unload()(x), wanted)
    size = (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size
    assert size < 4 * sum(p.numel() for p in trained(Adapted()).values()) + 1000


def test_adapters_may_be_personal_and_the_head_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sent(trainer: pl.Trainer) -> float:
        return float(trainer.callback_metrics["federated/bytes_up"])

    module, trainer, _ = fit(tmp_path, rounds=1, personal="*lora*")
    head = sum(p.numel() for name, p in trained(module).items() if "head" in name)
    assert sent(trainer) == 2 * 4 * head
    caplog.clear()
    _, trainer, _ = fit(tmp_path, rounds=1, personal="*head*")  # PEFT keeps the first head beside it, frozen
    adapters = sum(p.numel() for name, p in trained(module).items() if "lora" in name)
    assert sent(trainer) == 2 * 4 * adapters
    (said,) = (line for line in caplog.messages if line.startswith("Personal parameters"))
    assert f"4 ({2 * head:,} numbers; 2 are frozen)" in said
    assert f"saves {4 * head:,} of {4 * (head + adapters):,} bytes" in said


class Stacked(Adapted):
    stackable = True

    def __init__(self) -> None:
        super().__init__(dropout=0.0)


class OneByOne(Stacked):
    stackable = False


def test_stacked_clients_train_the_same_adapters(tmp_path: Path) -> None:
    stacked, _, _ = fit(tmp_path, rounds=1, kind=Stacked, engine="vectorized", compile=False)
    one_by_one, _, _ = fit(tmp_path, rounds=1, kind=OneByOne)
    for name, p in trained(stacked).items():
        torch.testing.assert_close(p, trained(one_by_one)[name], rtol=1e-4, atol=1e-6)


def test_the_example_learns_with_a_fraction_of_the_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lora.py"])  # not pytest's arguments
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    lora = __import__("lora")
    monkeypatch.setattr(lora, "ROUNDS", 4)
    try:
        lora.main()
    finally:
        del sys.modules["lora"]
    before, adapters, everything = [line.split() for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    kilobytes = [float(words[-4]) for words in (adapters, everything)]
    accuracies = [float(w[w.index("accuracy") + 1].rstrip(",")) for w in (before, adapters)]
    assert kilobytes[1] > 30 * kilobytes[0]
    assert (tmp_path / "runs" / "lora.png").stat().st_size > 10_000
    assert accuracies[1] > accuracies[0] + 0.1

"""What all processes of a run must have alike, so that they play the same rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_fed.data.sketch import sketch
from lightning_fed.lightning import pl
from lightning_fed.trainer.ranks import ranks_of

#: Settings of a Trainer that decide what a round is, and when processes wait for each other.
TRAINER = (
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "check_val_every_n_epoch",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "fast_dev_run",
    "barebones",
)


def check_federation(trainer: pl.Trainer, module: pl.LightningModule, facts: Mapping[str, Any]) -> None:
    """Refuse processes that would run different federations; ``facts`` are what the server knows."""
    ranks, data = ranks_of(trainer), trainer.datamodule
    if ranks.size == 1:
        return
    ids = data.client_ids
    shapes = {name: tuple(p.shape) for name, p in (*module.named_parameters(), *module.named_buffers())}
    found = {
        **facts,
        "clients": {cid: data.num_examples(cid) for cid in ids},
        "samples": sketch(data, ids),
        "batches": [data.batch_size, data.eval_batch_size, data.drop_last],
        "Trainer": {name: getattr(trainer, name) for name in TRAINER},
        "module": [type(module).__qualname__, shapes],
        "hparams": dict(module.hparams),
    }
    ranks.check_same({name: plain(value) for name, value in found.items()})


def check_optimizers_alike(trainer: pl.Trainer) -> None:
    """Refuse processes whose optimisers have other settings, such as a learning rate from the environment."""
    groups = [
        [type(each).__name__, [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]]
        for each in trainer.optimizers
    ]
    ranks_of(trainer).check_same({"optimizers": plain(groups)})


def plain(value: Any) -> Any:
    """A value that can be sent and compared; of objects, the type alone.

    >>> plain({"lr": 0.1, "sizes": (1, 2), "act": print})
    {'lr': '0.1', 'sizes': [1, 2], 'act': 'builtin_function_or_method'}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # nan is nan
    if isinstance(value, Tensor):
        return plain(value.tolist()) if value.numel() <= 100 else list(value.shape)
    if isinstance(value, Mapping):
        return {key if isinstance(key, int | str) else repr(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return type(value).__name__

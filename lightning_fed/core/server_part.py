"""The part of a checkpoint that may leave the machine: the server's model, nothing of its clients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: The key under which a checkpoint names the folder of its clients' records.
RECORDS = "client_records"
#: The key under which a checkpoint names its W&B runs.
RUNS = "wandb_runs"

#: Keys of a checkpoint that only the fit that wrote it can use. Callbacks hold what clients remember.
OF_THE_FIT = ("callbacks", "loops", "optimizer_states", "lr_schedulers", RECORDS, RUNS)


def server_part(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as ``load_from_checkpoint`` and ``Trainer.test`` need it: model and hyper-parameters.

    Weights are copied, because ``torch.save`` writes the whole storage of a tensor that is a part of a larger one.

    >>> import torch
    >>> stack = torch.arange(6.0).reshape(3, 2)  # the server's weights, and those of two clients
    >>> part = server_part({"state_dict": {"w": stack[0]}, "callbacks": {"server": stack}, "epoch": 3})
    >>> part, part["state_dict"]["w"].untyped_storage().nbytes()
    ({'state_dict': {'w': tensor([0., 1.])}, 'epoch': 3}, 8)
    """
    weights = copy.copy(checkpoint["state_dict"])  # not dict(...), which would lose the versions of modules
    for name, value in weights.items():
        weights[name] = value.clone() if isinstance(value, Tensor) else value
    return {**{key: value for key, value in checkpoint.items() if key not in OF_THE_FIT}, "state_dict": weights}

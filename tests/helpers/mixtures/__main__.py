"""A script: fit and resume with a Lightning package, then mix it with the other one.

``python mixtures PACKAGE OTHER FOLDER [CHECKPOINT]``. PACKAGE is imported before lightning_fed, OTHER after it, and
not at all if it is "". FOLDER/found.json is what was found.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import warnings
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
PACKAGE, OTHER, FOLDER = sys.argv[1:4]
pl: Any = import_module(PACKAGE)

import torch  # noqa: E402

from lightning_fed import FederatedServer  # noqa: E402
from lightning_fed.algorithms import FedADMM  # noqa: E402
from lightning_fed.cli.main import build  # noqa: E402
from lightning_fed.datamodules import Synthetic  # noqa: E402
from lightning_fed.lightning import is_overridden  # noqa: E402
from lightning_fed.lightning.package import in_this_package  # noqa: E402

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


def net(package: Any) -> Any:
    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(60, 10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Net()


def server() -> FederatedServer:
    return FederatedServer(FedADMM(), clients_per_round=2, local_steps=2, seed=0, evaluate_every=0, figure=False)


def fit(package: Any, module: Any, rounds: int, folder: str, ckpt: str | None = None, **kwargs: Any) -> str:
    """A digest of the fitted model; the last checkpoint is in the folder."""
    callbacks = [server(), *kwargs.pop("callbacks", ())]
    if kwargs.get("enable_checkpointing", True):
        callbacks.append(package.callbacks.ModelCheckpoint(f"{FOLDER}/{folder}", save_last=True))
    options = {"logger": False, "accelerator": "cpu", **QUIET, **kwargs}
    trainer = package.Trainer(max_epochs=rounds, callbacks=callbacks, **options)
    trainer.fit(module, datamodule=Synthetic(), ckpt_path=ckpt, weights_only=False if ckpt else None)
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def error_of(*args: Any, **kwargs: Any) -> str:
    try:
        fit(*args, 1, "mixed", enable_checkpointing=False, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fits() -> dict[str, str]:
    found = {"whole": fit(pl, net(pl), 2, "whole")}
    fit(pl, net(pl), 1, "first")
    found["resumed"] = fit(pl, net(pl), 2, "second", f"{FOLDER}/first/last.ckpt")
    if sys.argv[4:]:
        found["resumed from the other"] = fit(pl, net(pl), 2, "third", sys.argv[4])
    return found


def late_error() -> str:
    """What a Trainer says that is imported after the server and the datamodule were made."""
    made, data = server(), Synthetic()
    other = import_module(OTHER)
    try:
        other.Trainer(max_epochs=1, callbacks=[made], logger=False, **QUIET).fit(net(other), datamodule=data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def command_error(package: Any, module: Any) -> str:
    """What the command line of a package says about a module, and our datamodule."""
    try:
        import_module(f"{package.__name__}.cli").LightningCLI(module, Synthetic, run=False, args=[])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def config_error() -> str:
    """What our command line says about a class of a user's file that imports the other package."""
    Path("of_user.py").write_text(f"import {OTHER} as pl\n\nclass Stop(pl.callbacks.EarlyStopping):\n    pass\n")
    sys.path.insert(0, "")
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            build(["fit", "--model=MLP", "--data=Synthetic", "--trainer.callbacks+=of_user.Stop"])
    except SystemExit:
        return told.getvalue()
    return "no error"


def mixtures(late: str) -> dict[str, Any]:
    other: Any = import_module(OTHER)
    import_module(f"{OTHER}.loggers")

    class Hooks(other.Callback):
        called = False

        def on_train_epoch_end(self, *_: Any) -> None:
            self.called = True

    hooks = Hooks()
    return {
        "module": error_of(pl, net(other)),
        "Trainer": error_of(other, net(pl)),
        "Trainer and module": error_of(other, net(other)),
        "callback": error_of(pl, net(pl), callbacks=[other.callbacks.EarlyStopping("loss")]),
        "logger": error_of(pl, net(pl), logger=other.loggers.CSVLogger(FOLDER)),
        "late Trainer": late,
        "command line": command_error(other, type(net(other))),
        "module of a command line": command_error(pl, type(net(other))),
        "config": config_error(),
        "hooks": error_of(pl, net(pl), callbacks=[hooks]),
        "hooks called": hooks.called,
        "overridden": [is_overridden("on_train_epoch_end", hooks), is_overridden("on_after_backward", hooks)],
        "path": in_this_package(f"--trainer.callbacks={OTHER}.callbacks.ModelCheckpoint"),
    }


found: dict[str, Any] = fits()
if OTHER:
    found |= mixtures(late_error())
Path(FOLDER, "found.json").write_text(json.dumps(found))

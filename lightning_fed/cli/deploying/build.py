"""Build trainer, module and data of a server or a node from the arguments of ``lightning-fed fit``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.callbacks import ClientEvaluation, Confusion, FinalFigure
from lightning_fed.cli.main import FederatedCLI, build
from lightning_fed.deploy.node import NodeServer
from lightning_fed.deploy.remote import DeployedServer
from lightning_fed.lightning import LightningArgumentParser, pl
from lightning_fed.server import FederatedServer

#: The server has no data to validate on.
_ON_SERVER = ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
#: A node plays single rounds of a run that the server logs and saves.
_ON_NODE = [
    *_ON_SERVER,
    "--trainer.logger=false",
    "--trainer.callbacks=null",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_steps=-1",
    "--trainer.max_epochs=1",
]
#: Arguments of the Trainer that change local steps.
_OF_STEPS = (
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "limit_train_batches",
    "overfit_batches",
)
#: Callbacks that read clients' data.
_NEEDS_DATA = (ClientEvaluation, Confusion, FinalFigure)


class _DeployCLI(FederatedCLI):
    """Reads the arguments of ``fit`` and builds all classes, with another server."""

    server: type[FederatedServer]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.server, "federated")
        parser.add_method_arguments(pl.Trainer, "fit", skip=self.subcommands()["fit"])  # ckpt_path and the like


class ServerCLI(_DeployCLI):
    server = DeployedServer


class NodeCLI(_DeployCLI):
    server = NodeServer


def build_server(args: Sequence[str], cwd: str = "") -> FederatedCLI:
    """Everything of a server; callbacks that need clients' data are left out."""
    cli = _built(args, cwd, ServerCLI, _ON_SERVER)
    cli.trainer.callbacks = [own for own in cli.trainer.callbacks if not isinstance(own, _NEEDS_DATA)]
    server = server_of(cli.trainer)
    assert isinstance(server, DeployedServer)
    server.config = common_config(cli)
    return cli


def build_node(args: Sequence[str], cwd: str = "") -> FederatedCLI:
    """Everything of a node; the config's callbacks and loggers are the server's."""
    cli = _built(args, cwd, NodeCLI, _ON_NODE)
    server = server_of(cli.trainer)
    assert isinstance(server, NodeServer)
    server.config = common_config(cli)
    return cli


def _built(args: Sequence[str], cwd: str, cli: type[FederatedCLI], more: Sequence[str]) -> FederatedCLI:
    del sys.argv[1:]  # Lightning warns of arguments beside those that it is given
    if cwd:
        os.chdir(cwd)  # paths in a config, and a user's own modules, are relative to where it was written for
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return build([*args, *more], cli=cli, run=False)


def common_config(cli: FederatedCLI) -> dict[str, Any]:
    """What changes local steps, beside ``federated``: a node's config must have it in common with the server's."""
    config = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    found = {name: config["trainer"][name] for name in _OF_STEPS}
    found |= _flat({name: config.get(name) for name in ("model", "optimizer")})
    return {**found, "batch_size": cli.datamodule.batch_size, "drop_last": cli.datamodule.drop_last}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def server_of(trainer: pl.Trainer) -> FederatedServer:
    """The callback that runs the federation."""
    return next(own for own in trainer.callbacks if isinstance(own, FederatedServer))


def absolute(args: Sequence[str]) -> list[str]:
    """Arguments whose config files are found from any folder."""
    found, after = [], ""
    for word in args:
        if after in ("--config", "-c") and Path(word).exists():
            word = str(Path(word).absolute())
        elif word.startswith("--config=") and Path(word[9:]).exists():
            word = f"--config={Path(word[9:]).absolute()}"
        found.append(word)
        after = word
    return found

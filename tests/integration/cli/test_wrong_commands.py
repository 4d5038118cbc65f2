"""A wrong command is one line on stderr and exit code 2; a bug keeps its traceback."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import wandb

import lightning_fed.configs
from lightning_fed.cli import run
from lightning_fed.engines import ClientError

CONFIGS = Path(lightning_fed.configs.__file__).parent
SYNTHETIC = f"--config {CONFIGS / 'synthetic_fedadmm.yaml'}"
FEMNIST = f"--config {CONFIGS / 'femnist_fedadmm.yaml'} --trainer.logger=false --trainer.callbacks=null"
SMALL = (
    f"{SYNTHETIC} --data.init_args.clients=3 --federated.clients_per_round=2 --federated.local_steps=2"
    " --trainer.max_epochs=1 --trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
    " --trainer.logger=false --trainer.callbacks=null"
)
MODULES = """
from lightning_fed.models import MLP

class Step(MLP):
    stackable = False
    def training_step(self, batch, batch_idx):
        return None + 1

class Shapes(MLP):
    def forward(self, x):
        return super().forward(x[:, :7])

class Constructor(MLP):
    def __init__(self, lr: float = 0.01):
        raise KeyError("lost")

class Conversion(MLP):
    def __init__(self, lr: float = 0.01):
        int("seven")

class Optimizers(MLP):
    def configure_optimizers(self):
        raise ValueError("of the user's own code")

class Strict(MLP):
    def __init__(self, lr: float = 0.01):
        raise ValueError("lr and the moon do not fit")
"""

#: By command: what its line says. Small files of the wrong kinds are in the folder.
WRONG = {
    # the command and its configs
    "": 'expected "subcommand" to be one of',
    "fitt": "There is no command fitt. Did you mean fit?",
    "fit": "the following arguments are required",
    "fit --config gone.yaml": "gone.yaml",
    "fit --config folder": "Path is not a file",
    "fit --config malformed.yaml": "line 2",
    "fit --config list.yaml": "Unexpected config",
    "fit --config binary.yaml": "The config cannot be read",
    "fit --config unknown.yaml": "federatd",
    "fit --config nothing.yaml": "nothing.yaml is empty",
    "fit --config interpolated.yaml": "nothing.here",
    "fit --config without_base.yaml": "base 'gone.yaml'",
    # values of settings
    f"fit {SMALL} --nothing=1": "nothing",
    f"fit {SMALL} --federated.clients_per_round=31": "Cannot draw 31 clients per round: the federation has 3",
    f"fit {SMALL} --federated.clients_per_round=two": 'Parser key "federated.clients_per_round": Expected a int',
    f"fit {SMALL} --federated.algorithm=FedADM": "There is no class FedADM. Did you mean FedADMM?",
    f"fit {SMALL} --federated.algorithm=FedAvgg": "Did you mean FedAvg? lightning_fed.algorithms has Compressed, ",
    f"fit {SMALL} --federated.algorithm=fedadmm": "There is no class fedadmm. Did you mean FedADMM?",
    "fti": "There is no command fti. Did you mean fit? There are fit, validate, ",
    f"fit {SMALL} --federated.algorithm.g=Box1": "There is no class Box1. Did you mean Box? lightning_fed.prox has ",
    f"fit {SMALL} --federated.sampler=Nonsense": "Give package.Class, or a short name: lightning_fed.sampling has ",
    f"fit {SMALL} --trainer.callbacks+=EarlyStoping": "There is no class EarlyStoping. Did you mean EarlyStopping?",
    f"fit {SMALL} --trainer.logger=AutoWandbLoger": "There is no class AutoWandbLoger. Did you mean AutoWandbLogger?",
    f"fit {SMALL} --federated.algorithm=Nonsense": "lightning_fed.algorithms has Compressed, FedADMM, ",
    f"fit {SMALL} --federated.algorithm.eta=-1": "FedADMM.eta must be positive, got -1.0",
    f"fit {SMALL} --federated.algorithm.eta=abc": "Given value: abc",
    f"fit {SMALL} --federated.algorithm.nothing=1": "Option 'nothing' is not accepted",
    f"fit {SMALL} --federated.algorithm=FedSplit": "FedSplit needs every client in every round",
    f"fit {SMALL} --federated.local_epochs=2": "local_epochs",
    f"fit {SMALL} --model=modules.Nothing": "module 'modules' has no attribute 'Nothing'",
    f"fit {SMALL} --model=modules.Strict": "lr and the moon do not fit",
    f"fit {SMALL} --data.init_args.batch_size=0": "batch_size must be a whole number >= 1, got 0",
    f"fit {SMALL} --trainer.devices=0": "devices",
    f"fit {SMALL} --trainer.strategy=fsdp": "The strategy `fsdp` requires a GPU accelerator",
    f"fit {SMALL} --trainer.max_epochs=-3": "`max_epochs` must be a non-negative integer or -1",
    # sizes that do not fit
    f"fit {SMALL} --model.init_args.sizes=[60,5]": "The model does not fit the data: Target",
    f"fit {SMALL} --model.init_args.sizes=[50,10] --trainer.limit_val_batches=0": "does not fit the data: round 0",
    f"fit {SMALL} --model=FemnistCNN": "The model does not fit the data: shape",
    f"advise {SMALL} --model.init_args.sizes=[60,5]": "The model does not fit the data: Target",
    # files
    f"fit {SMALL} --ckpt_path=gone.ckpt": "ckpt_path: there is no file gone.ckpt",
    f"fit {SMALL} --ckpt_path=folder": "folder is a folder",
    f"fit {SMALL} --ckpt_path=text.ckpt": "text.ckpt is not a checkpoint",
    f"fit {SMALL} --ckpt_path=empty.ckpt": "empty.ckpt is not a checkpoint",
    f"validate {SMALL} --ckpt_path=archive.ckpt": "archive.ckpt is not a checkpoint",
    f"test {SMALL} --ckpt_path=tensor.ckpt": "tensor.ckpt is not a checkpoint of a Trainer",
    f"test {SMALL} --ckpt_path=other.ckpt": "other.ckpt is not a checkpoint of a Trainer",
    f"fit {SMALL} --ckpt_path=best": "ckpt_path",
    f"fit {SMALL} --trainer.default_root_dir=text.ckpt/x": "Not a directory: text.ckpt/x",
    f"fit {FEMNIST} --data.init_args.path=gone": "gone",
    f"fit {FEMNIST} --data.init_args.path=text.ckpt": "text.ckpt",
    # the other commands
    "reproduce": "the following arguments are required: experiment",
    "reproduce nothing": "invalid choice: 'nothing'",
    "reproduce synthetic --quick --rounds=0": "must be a whole number >= 1, got '0'",
    "reproduce synthetic --quick --also FedNothing": "There is no algorithm 'FedNothing'",
    "reproduce synthetic --quick --also FedProx:nu=1": "FedProx has no hyper-parameter 'nu'",
    "reproduce synthetic --quick --seeds=-1": "-1 is not in bounds",
    "reproduce synthetic --quick --sets=-1": "Synthetic.a must be non-negative, got -1.0",
    "reproduce femnist --quick --data gone": "gone",
    "reproduce synthetic --quick --out text.ckpt": "Not a directory: text.ckpt",
    "compare --only FedNothing": "There is no algorithm 'FedNothing'",
    "compare --only FedAvgg": "There is no algorithm 'FedAvgg'. Did you mean FedAvg? Choose from FedADMM, ",
    "compare --only FedADMM:eta": "'eta' of FedADMM needs a value, for instance FedADMM:eta=1; got 'FedADMM:eta'",
    "compare --only FedADMM:etta=1": "FedADMM has no hyper-parameter 'etta'. It takes eta, alpha, g, ",
    "compare --only FedAvg+TopK:k=0": "k",
    "compare --quick --only FedAvg --out text.ckpt": "Not a directory: text.ckpt",
    "compare --nothing": "unrecognized arguments: --nothing",
    f"advise {SMALL} --clients=0": "argument --clients",
    f"advise {SMALL} --federated.clients_per_round=31": "Cannot draw 31 clients per round: the federation has 3",
    f"advise {SMALL} --ckpt_path=gone.ckpt": "ckpt_path: there is no file gone.ckpt",
    "data": "There are no data",
    "data --data=Synthetic --data.clients=0": "Synthetic.clients must be",
    "data --data=Synthetic --data.clients=3 --out text.ckpt": "File exists: text.ckpt",
    "data --data=Synthetc": "There is no class Synthetc. Did you mean Synthetic?",
    "data --config malformed.yaml": "line 2",
}

BUGS = {
    f"fit {SMALL} --trainer.limit_val_batches=0 --model=modules.Step": (ClientError, "unsupported operand"),
    f"fit {SMALL} --model=modules.Shapes": (RuntimeError, "mat1"),
    f"fit {SMALL} --model=modules.Constructor": (KeyError, "lost"),
    f"fit {SMALL} --model=modules.Conversion": (ValueError, "invalid literal for int"),
    f"fit {SMALL} --model=modules.Optimizers": (ValueError, "of the user's own code"),
}


def short(command: str) -> str:
    return command.replace(SMALL, "SMALL").replace(FEMNIST, "FEMNIST") or "nothing"


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "modules", raising=False)
    texts = {
        "malformed.yaml": "trainer: [unclosed\n  a: b: c",
        "nothing.yaml": "\n",
        "list.yaml": "- 1\n- 2\n",
        "unknown.yaml": "federatd:\n  local_steps: 3\n",
        "interpolated.yaml": "data:\n  class_path: Synthetic\n  init_args:\n    a: ${nothing.here}\n",
        "without_base.yaml": "base: gone.yaml\n",
        "text.ckpt": "hello",
        "empty.ckpt": "",
        "modules.py": MODULES,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()
    torch.save({"a": 1}, tmp_path / "other.ckpt")
    torch.save(torch.zeros(3), tmp_path / "tensor.ckpt")
    with zipfile.ZipFile(tmp_path / "archive.ckpt", "w") as archive:
        archive.writestr("a", "b")
    level = logging.getLogger("pytorch_lightning").level
    yield
    logging.getLogger("pytorch_lightning").setLevel(level)
    wandb.finish()


def called(command: str, folder: Path) -> tuple[int, str]:
    """Exit code of a command and what it wrote to stderr, in a child: an interrupted backward pass may leave threads
    of autograd behind, after which the process could not train in forked workers."""
    with (folder / "stderr").open("w+") as written:
        if (pid := os.fork()) == 0:
            os.dup2(written.fileno(), 2)
            sys.argv, sys.stderr, code = ["lightning-fed", *command.split()], written, 0
            try:
                run()
            except SystemExit as stop:
                code = int(stop.code or 0)
            except BaseException:  # a bug: what Python would print
                traceback.print_exc(file=written)
                code = 1
            written.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, (folder / "stderr").read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", WRONG, ids=short)
def test_a_wrong_command_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    code, err = called(command, tmp_path)
    assert code == 2
    *before, last = err.strip().splitlines()
    assert last.startswith("lightning-fed")
    assert WRONG[command] in last.partition("error: ")[2]
    assert not [line for line in before if "Traceback" in line or "usage:" in line]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", BUGS, ids=short)
def test_a_bug_keeps_its_traceback(command: str, tmp_path: Path) -> None:
    error, message = BUGS[command]
    code, err = called(command, tmp_path)
    assert code == 1
    assert "Traceback (most recent call last)" in err
    last = err.strip().splitlines()[-1]
    assert error.__name__ in last
    assert re.search(message, last)

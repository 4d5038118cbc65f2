"""``lightning-fed checkpoint inspect|verify|export FILE``: look at checkpoints without the program that made them."""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_fed.core.federation import FORMAT
from lightning_fed.core.records import num_bytes
from lightning_fed.core.server_part import RECORDS, server_part
from lightning_fed.store import (
    DamagedCheckpointError,
    DamagedRecordError,
    durable,
    is_unsealed,
    summaries_in,
    verify,
    verify_snapshot,
    write_sealed,
)
from lightning_fed.trainer.checkpoint_io import records_of

DESCRIPTION = """\
Inspect, verify or export checkpoints of federated fits. Reads checkpoint files and the records of clients beside them;
nothing in them is executed. Exit code: 1 if `verify` finds damage, 2 if a command cannot be carried out."""
EPILOG = """\
examples:
  lightning-fed checkpoint inspect runs/checkpoints/last.ckpt
  lightning-fed checkpoint verify runs/checkpoints
  lightning-fed checkpoint export runs/checkpoints/last.ckpt --state-dict model.pt --lightning model.ckpt"""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(args: list[str] | None = None) -> None:
    """Run one of the three commands."""
    parser = _parser()
    asked = parser.parse_args(sys.argv[2:] if args is None else args)
    try:
        good = {"inspect": _inspect, "verify": _verify, "export": _export}[asked.command](asked)
    except (DamagedCheckpointError, DamagedRecordError, ValueError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
    if not good:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    how: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser("lightning-fed checkpoint", description=DESCRIPTION, epilog=EPILOG, **how)
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|verify|export")
    text = "print algorithm, settings, round, seed, clients, parameters, sizes and versions"
    inspect = commands.add_parser("inspect", help=text, description=f"{text.capitalize()}.", **how)
    inspect.add_argument("file", type=Path, metavar="FILE")
    inspect.add_argument("--json", action="store_true", help="print them as JSON")
    text = "read every byte of checkpoints and their records; name damage by file and part"
    check = commands.add_parser("verify", help=text, description=f"{text.capitalize()}.", **how)
    check.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="file, or folder: all *.ckpt in it")
    text = "write the server's model to files that need nothing of lightning_fed"
    export = commands.add_parser("export", help=text, description=f"{text.capitalize()}.", **how)
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("--state-dict", type=Path, metavar="OUT", help="for torch.load and Module.load_state_dict")
    export.add_argument(
        "--lightning",
        type=Path,
        metavar="OUT",
        help="for load_from_checkpoint and Trainer.test(ckpt_path=): model and hyperparameters, as with"
        " save_weights_only",
    )
    export.add_argument("--force", action="store_true", help="overwrite files that exist")
    return parser


def _load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, verified if it has a seal."""
    with path.open("rb"):  # a missing file is not a damaged one
        pass
    try:
        if not is_unsealed(path):
            verify(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects other than tensors, numbers and strings; they are not loaded, because they could"
            " run code."
        ) from error
    except RuntimeError as error:  # torch's, for a file of another program
        if isinstance(error, DamagedCheckpointError):
            raise
        raise ValueError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} is not a checkpoint: it holds one object of type {type(loaded).__name__}.")
    return loaded


# -- inspect -------------------------------------------------------------------------------------------------------


def _inspect(asked: argparse.Namespace) -> bool:
    facts = inspect(asked.file)
    print(json.dumps(_finite(facts), indent=2, default=str) if asked.json else _described(facts))
    return True


def inspect(path: Path) -> dict[str, Any]:
    """Facts about a checkpoint, as ``--json`` prints them."""
    real = Path(os.path.realpath(path))
    loaded = _load(real)
    server = _server(path, loaded)
    saved = server["federation"]
    shapes = saved["parameters"]
    folder, store = records_of(real, loaded), saved["store"] or {}
    visits = [s.visits for s in summaries_in(folder).values()] if folder else [c["visits"] for c in store.values()]
    records = loaded[RECORDS]["manifest"]["bytes"] if folder else num_bytes(store)
    return {
        "file": str(path),
        "algorithm": saved["algorithm"],
        "settings": server["settings"],
        "round": max(0, saved["rounds_done"]),
        "seed": server["seed"],
        "clients": {"total": len(saved["clients"]), "visited": sum(map(bool, visits))},
        "parameters": {
            "total": sum(map(math.prod, shapes.values())),
            "trained": sum(math.prod(shapes[name]) for name in saved["layouts"][-1]),
            "personal": sum(math.prod(shapes[name]) for name in saved.get("personal", ()) if name in shapes),
        },
        "bytes": {"file": real.stat().st_size, "records": records},
        "records": None if folder is None else folder.name,  # where clients' memories are in the file: None
        "versions": {
            "lightning": loaded.get("pytorch-lightning_version"),
            "federation": saved["format"],
            "records": None if folder is None else loaded[RECORDS]["manifest"]["version"],
        },
    }


def _server(path: Path, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the FederatedServer that wrote a checkpoint."""
    if "callbacks" not in loaded:
        raise ValueError(f"{path} holds weights only, without the state of a federation.")
    states = [s for s in loaded["callbacks"].values() if isinstance(s, dict) and "federation" in s]
    if not states or states[0]["federation"] is None:
        raise ValueError(f"{path} was not made by a federated fit.")
    if (made := states[0]["federation"].get("format", 1)) != FORMAT:
        by = "lightning_fed 0.1.0, or a development version of 0.2.0" if made < FORMAT else "a later lightning_fed"
        raise ValueError(f"{path} was made by {by} (format {made}, this version reads {FORMAT}).")
    return dict(states[0])


def _described(facts: Mapping[str, Any]) -> str:
    clients, parameters, size = facts["clients"], facts["parameters"], facts["bytes"]
    personal = f", {parameters['personal']:,} personal" if parameters["personal"] else ""
    where = "in the file" if facts["records"] is None else f"in {facts['records']}"
    rows = {
        "algorithm": _call(facts["algorithm"]),
        "settings": ", ".join(f"{name}={value}" for name, value in facts["settings"].items()),
        "round": facts["round"],
        "seed": facts["seed"],
        "clients": f"{clients['total']:,}, of which {clients['visited']:,} visited",
        "parameters": f"{parameters['total']:,}, of which {parameters['trained']:,} trained{personal}",
        "file": f"{size['file']:,} bytes",
        "records": f"{size['records']:,} bytes, {where}",
        "versions": ", ".join(f"{name} {value}" for name, value in facts["versions"].items() if value is not None),
    }
    return "\n".join([facts["file"], *(f"  {name:12}{value}" for name, value in rows.items())])


def _call(settings: Any) -> str:
    """Settings of an algorithm as one would write them in Python."""
    if isinstance(settings, Mapping) and "name" in settings:
        fields = (f"{name}={_call(value)}" for name, value in settings.items() if name != "name")
        return f"{settings['name']}({', '.join(fields)})"
    return f"[{', '.join(map(_call, settings))}]" if isinstance(settings, list) else repr(settings)


def _finite(value: Any) -> Any:
    """A value with strings for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# -- verify --------------------------------------------------------------------------------------------------------


def _verify(asked: argparse.Namespace) -> bool:
    paths = list(_files(asked.paths))
    damaged = 0
    for path in paths:
        found = list(damage(path))
        damaged += bool(found)
        print(f"{path}: {'damaged' if found else 'good'}", *(f"  {each}" for each in found), sep="\n")
    print(f"checkpoints: {len(paths) - damaged} good, {damaged} damaged")
    return not damaged


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Files by these paths and in these folders; a file with several names, such as last.ckpt, once."""
    seen: set[str] = set()
    for given in paths:
        inside = sorted(p for p in given.glob("*.ckpt") if not p.is_dir()) if given.is_dir() else [given]
        if not inside:
            raise ValueError(f"{given} has no *.ckpt.")
        given.stat()  # a missing file is an error of the caller
        for path in sorted(inside, key=Path.is_symlink):
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path


def damage(path: Path) -> Iterator[str]:
    """Read a checkpoint and all its records; yield what is damaged, by file and part."""
    real = Path(os.path.realpath(path))
    try:
        verify(real)  # _load reads files without a seal, too
        folder = records_of(real, _load(real))
    except (DamagedCheckpointError, DamagedRecordError, ValueError) as error:
        yield str(error)
        return
    yield from map(str, verify_snapshot(folder) if folder else [])


# -- export --------------------------------------------------------------------------------------------------------


def _export(asked: argparse.Namespace) -> bool:
    targets = [path for path in (asked.state_dict, asked.lightning) if path is not None]
    if not targets:
        raise ValueError("Give --state-dict OUT, --lightning OUT, or both.")
    places = {os.path.realpath(path) for path in (asked.file, *targets)}
    if len(places) <= len(targets):
        raise ValueError("FILE and the files to write must be different files.")
    for path in targets:
        if path.is_dir():
            raise ValueError(f"{path} is a folder.")
        if os.path.lexists(path) and not asked.force:
            raise ValueError(f"{path} exists. Use --force to overwrite it.")
    loaded = _load(asked.file)
    if "state_dict" not in loaded:
        raise ValueError(f"{asked.file} holds no model.")
    part = server_part(loaded)
    for path, content in ((asked.state_dict, part["state_dict"]), (asked.lightning, part)):
        if path is not None:
            durable.make_folder(path.parent)
            write_sealed(content, path)
            print(path)
    return True

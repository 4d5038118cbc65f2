"""Snapshots: folders with one complete commit of a store, by links to its records."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_fed.core.cache import digest_of
from lightning_fed.core.memory import Build, ClientId, Memory, Summary
from lightning_fed.store import durable
from lightning_fed.store.damage import DamagedRecordError
from lightning_fed.store.files import location_of
from lightning_fed.store.identity import cid_of
from lightning_fed.store.index import Index
from lightning_fed.store.records import read

VERSION = 1
MANIFEST = "manifest.json"


def make_snapshot(index: Index, records: Path, folder: Path) -> dict[str, Any]:
    """Link the records of the newest commit into a new folder; the manifest, written last, marks it as complete."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; a snapshot needs a folder of its own.")
    durable.make_folder(folder)
    try:
        linked = durable.make_folder(folder / "records")
        with durable.complete(folder / "index.sqlite3") as part:
            files = index.copy(part)
        for name in files:
            durable.link(records / name, linked / name)
        durable.sync_folder(linked)
        database = folder / "index.sqlite3"
        facts: dict[str, Any] = {"version": VERSION, "round": next(reversed(index.rounds), None), "files": len(files)}
        facts |= {"bytes": sum(files.values()), "index": digest_of(database)}
        durable.write(folder / MANIFEST, [_sealed(facts)])
    except BaseException:
        durable.remove_folder(folder)
        raise
    return facts


def _sealed(facts: dict[str, Any]) -> bytes:
    return json.dumps({**facts, "sha256": _digest(facts)}).encode()


def _digest(facts: dict[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a snapshot's manifest, and verify it and the index; raise DamagedRecordError if one of them is damaged.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> index = Index.open(folder / "index.sqlite3")
    >>> made = make_snapshot(index, folder, folder / "saved")
    >>> read_manifest(folder / "saved") == made, made["files"]
    (True, 0)
    >>> index.close()
    """
    path = folder / MANIFEST
    try:
        facts = json.loads(path.read_bytes())
        claimed = facts.pop("sha256")
        version = facts["version"]
    except OSError as error:
        raise DamagedRecordError(path, "manifest", error.strerror or str(error)) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedRecordError(path, "manifest", "this is not a manifest") from error
    if version != VERSION:
        raise DamagedRecordError(path, "version", f"format version {version}, this program reads {VERSION}")
    if claimed != _digest(facts):
        raise DamagedRecordError(path, "manifest", "checksum differs")
    database = folder / "index.sqlite3"
    try:
        if digest_of(database) != facts["index"]:
            raise DamagedRecordError(database, "index", "checksum differs")
    except OSError as error:
        raise DamagedRecordError(database, "index", error.strerror or str(error)) from error
    return dict(facts)


def copy_snapshot(snapshot: Path, folder: Path) -> None:
    """Link a snapshot's records into the empty folder of a store; the index, copied last, makes them visible."""
    read_manifest(snapshot)
    records = durable.make_folder(folder / "records")
    for name in _files(snapshot):
        try:
            durable.link(snapshot / "records" / name, records / name)
        except FileNotFoundError as error:
            raise DamagedRecordError(snapshot / "records" / name, "file", "it is missing") from error
    durable.sync_folder(records)
    with durable.complete(folder / "index.sqlite3") as part:
        shutil.copyfile(snapshot / "index.sqlite3", part)


def _files(snapshot: Path) -> list[str]:
    index = Index.of_snapshot(snapshot / "index.sqlite3")
    try:
        return list(index.files())
    finally:
        index.close()


def memories_in(folder: Path | str, build: Build) -> dict[ClientId, Memory]:
    """All memories of a snapshot, verified, in RAM; ``build`` makes a state of its tensors and their layout.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.store import DiskStore
    >>> folder, fresh = Path(mkdtemp()), lambda: FedAvg().init_client(torch.zeros(2))
    >>> with DiskStore(folder / "store", fresh) as store:
    ...     store.commit(1, {"ann": Memory(fresh(), visits=3)}, server={})
    ...     made = store.snapshot(folder / "saved")
    >>> found = memories_in(folder / "saved", build=lambda tensors, layout: fresh())
    >>> {client: memory.visits for client, memory in found.items()}
    {'ann': 3}
    """
    folder = Path(folder)
    read_manifest(folder)
    index, found = Index.of_snapshot(folder / "index.sqlite3"), {}
    try:
        for row in index.rows():
            record, known = read(location_of(folder / "records", row)), row.summary()
            state = build(record.tensors, record.layout)
            found[cid_of(row.key)] = Memory(state, known.visits, record.buffers, known.cost, record.layout)
    finally:
        index.close()
    return found


def summaries_in(folder: Path) -> dict[ClientId, Summary]:
    """Visits, cost and bytes of all clients of a snapshot, without reading their records.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.store import DiskStore
    >>> folder, fresh = Path(mkdtemp()), lambda: FedAvg().init_client(torch.zeros(2))
    >>> with DiskStore(folder / "store", fresh) as store:
    ...     store.commit(1, {"ann": Memory(fresh(), visits=3)}, server={})
    ...     made = store.snapshot(folder / "saved")
    >>> summaries_in(folder / "saved")["ann"].visits
    3
    """
    read_manifest(folder)
    index = Index.of_snapshot(folder / "index.sqlite3")
    try:
        return {cid_of(row.key): row.summary() for row in index.rows()}
    finally:
        index.close()


def verify_snapshot(folder: Path | str) -> list[DamagedRecordError]:
    """Read all records of a snapshot; list the damage, by file and part.

    >>> [str(damage) for damage in verify_snapshot("nowhere")]
    ['nowhere/manifest.json is damaged: manifest: No such file or directory']
    """
    folder = Path(folder)
    try:
        read_manifest(folder)
    except DamagedRecordError as damage:
        return [damage]
    index, found = Index.of_snapshot(folder / "index.sqlite3"), []
    try:
        for row in index.rows(server=True):
            try:
                read(location_of(folder / "records", row))
            except DamagedRecordError as damage:
                found.append(damage)
    finally:
        index.close()
    return found

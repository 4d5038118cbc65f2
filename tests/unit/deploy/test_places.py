"""Folders, keys, the proxy's config, units and the supervisor: what surrounds a federation."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from lightning_fed.cli.commands import deploy
from lightning_fed.cli.main import main
from lightning_fed.deploy import pki, proxy
from lightning_fed.deploy.hosting import DeployError, ServerHost
from lightning_fed.deploy.journal import Journal
from lightning_fed.deploy.places import NodePlace, ServerPlace
from lightning_fed.deploy.supervisor import Supervisor, is_running
from lightning_fed.deploy.units import unit


def public_key(folder: Path, name: str) -> bytes:
    return pki.make_node_key(folder / name).with_suffix(".pub").read_bytes()


def place(folder: Path) -> ServerPlace:
    found = ServerPlace(folder, ["--config", "a.yaml"])
    found.admit("one", public_key(folder, "first"), ["ann", "bob"])
    found.nodes["one"]["id"] = 7
    found.save()
    return ServerPlace.load(folder)


def test_a_node_speaks_for_its_own_clients_and_for_no_other_nodes(tmp_path: Path) -> None:
    server = place(tmp_path)
    assert server.owners == {"ann": 7, "bob": 7}
    with pytest.raises(ValueError, match="client 'bob' is at node 'one'"):
        server.admit("two", public_key(tmp_path, "second"), ["eve", "bob"])
    with pytest.raises(ValueError, match="the name is taken"):
        server.admit("one", public_key(tmp_path, "second"), ["eve"])
    assert list(ServerPlace.load(tmp_path).nodes) == ["one"]


def test_the_name_of_a_node_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    server = place(tmp_path / "server")
    server.admit("../../x", public_key(tmp_path / "server", "second"), ["eve"])
    assert {path.parent.name for path in tmp_path.rglob("*.pub")} == {"server"}
    assert len(list(tmp_path.rglob("*.pub"))) == 4


def test_an_expelled_node_is_unregistered_and_its_clients_go(tmp_path: Path) -> None:
    place(tmp_path).expel("one")
    server = ServerPlace.load(tmp_path)
    assert (server.nodes, server.expelled, server.owners) == ({}, [7], {})
    with pytest.raises(ValueError, match="There is no node 'one'"):
        server.expel("one")


def test_a_key_is_admitted_once_and_only_a_public_one(tmp_path: Path) -> None:
    server, key = place(tmp_path), (tmp_path / "first.pub").read_bytes()
    with pytest.raises(ValueError, match="is that of node 'one'"):
        server.admit("two", key + b" comment", ["eve"])
    server.expel("one")
    with pytest.raises(ValueError, match="was expelled, and Flower registers no key twice"):
        ServerPlace.load(tmp_path).admit("one", key, ["ann"])
    for wrong in ((tmp_path / "first").read_bytes(), b"nothing", b""):
        with pytest.raises(ValueError, match="not the public key of a node"):
            server.admit("two", wrong, ["eve"])
    server.admit("one", public_key(tmp_path, "second"), ["ann"])  # the same client, with another key


class Registry:
    """What the SuperLink keeps of keys, behind Flower's commands."""

    def __init__(self) -> None:
        self.status: dict[int, str] = {}
        self.keys: list[str] = []
        self.die_after_register = False

    def command(self, kind: str, what: str, *words: str, check: bool = True) -> dict[str, object]:
        if what == "list":
            return {"nodes": [{"node-id": str(n), "status": status} for n, status in self.status.items()]}
        if what == "unregister":
            assert self.status[int(words[0])] != "unregistered"
            self.status[int(words[0])] = "unregistered"
            return {}
        key = Path(words[0]).read_text()
        assert key not in self.keys, "Flower registers no key twice"
        self.keys.append(key)
        self.status[len(self.keys)] = "registered"
        if self.die_after_register:
            raise KeyboardInterrupt
        return {"node-id": str(len(self.keys))}


def test_registration_goes_on_wherever_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(ServerHost, "_flwr", lambda self, *words, **options: registry.command(*words, **options))

    def start() -> ServerPlace:
        with Supervisor(tmp_path / "logs") as supervisor:
            ServerHost(ServerPlace.load(tmp_path), supervisor).register()
        return ServerPlace.load(tmp_path)

    server = ServerPlace(tmp_path)
    for name in ("one", "two"):
        server.admit(name, public_key(tmp_path, name), [name])
    registry.die_after_register = True
    for expected in ({}, {"one": 1}):  # each ends when Flower has the key, and before its number is noted
        with pytest.raises(KeyboardInterrupt):
            start()
        assert ServerPlace.load(tmp_path).owners == expected
    registry.die_after_register = False
    assert start().owners == {"one": 1, "two": 2}
    ServerPlace.load(tmp_path).expel("two")
    assert ServerPlace.running(tmp_path).owners == {"one": 1, "two": 2}  # until the next start
    assert start().owners == ServerPlace.running(tmp_path).owners == {"one": 1}
    assert registry.status == {1: "registered", 2: "unregistered"}
    registry.__init__()  # type: ignore[misc]  # the SuperLink's database was removed
    registry.keys.append("another")
    assert start().owners == {"one": 2}


def test_a_server_without_nodes_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor, pytest.raises(DeployError, match="has no nodes"):
        ServerHost(ServerPlace(tmp_path), supervisor).up()


def test_a_new_run_puts_the_journal_aside_and_begins_with_its_model(tmp_path: Path) -> None:
    server = place(tmp_path)
    with Journal(tmp_path / "journal") as journal:
        journal.commit(4, {})
    server.begin_anew()
    assert not (tmp_path / "journal").exists()
    assert ServerPlace.load(tmp_path).weights.endswith("journal-1/round-000004.ckpt")


def test_a_folder_without_settings_is_refused_with_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="deploy init client"):
        NodePlace.load(tmp_path)


def test_processes_have_no_telemetry_updates_or_installs_and_secrets_are_no_arguments(tmp_path: Path) -> None:
    server, node = place(tmp_path), NodePlace(tmp_path)
    for environment in (server.environment(), node.environment()):
        assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
        assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert environment["FLWR_HOME"].startswith(str(tmp_path))
    link = server.superlink()
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(link)
    assert link[link.index("--host") + 1] == "127.0.0.1"
    assert link[link.index("--isolation") + 1] == "process"
    assert "--insecure" not in [*link, *server.superexec(), *node.supernode(), *node.superexec()]


def test_the_superlink_waits_longer_for_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed: it needs Python 3.11")
    from flwr.supercore import sql_mixin

    from lightning_fed.deploy import superlink

    found: list[Any] = []

    def run() -> None:
        connection = sqlite3.connect(tmp_path / "a.db")
        sql_mixin._set_sqlite_pragmas(connection, None)
        found.append(connection.execute("PRAGMA busy_timeout").fetchone()[0])
        connection.close()

    monkeypatch.setattr(superlink, "flower_superlink", run)
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # restored after the test
    superlink.main()
    assert found == [superlink.WAIT]


def test_the_proxy_lets_only_paths_of_nodes_through() -> None:
    text = proxy.config(Path("here"), "0.0.0.0:9092", 9093, body_mb=20)
    assert text.count("proxy_pass") == 1
    assert "location ~ ^/v1/fleet/[a-z-]+$" in text
    assert "location / { return 403; }" in text
    assert "client_max_body_size 20m;" in text


def test_a_unit_names_its_folder_and_may_write_nowhere_else(tmp_path: Path) -> None:
    text = unit("client", tmp_path / "my fed 100%")
    assert f'-m lightning_fed deploy client "{tmp_path}/my fed 100%%"' in text
    assert f'ReadWritePaths="{tmp_path}/my fed 100%%"\n' in text
    assert f'Environment="HOME={tmp_path}/my fed 100%%"' in text
    assert "ProtectSystem=strict" in text
    assert "SuccessExitStatus=143" in text  # systemctl stop is no failure


@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("command", ["server", "client"])
def test_systemd_accepts_the_units(command: str, tmp_path: Path) -> None:
    path = tmp_path / "lightning-fed.service"
    path.write_text(unit(command, tmp_path / "my fed 100%", cwd=str(tmp_path)))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert str(path.name) not in done.stderr


def test_a_process_that_ends_is_started_again_and_all_end_together(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    code += "; print('up', flush=True); time.sleep(60)"
    with Supervisor(tmp_path) as supervisor:
        task = supervisor.add("one", [sys.executable, "-c", code], os.environ)
        wait(lambda: task.log.read_text().count("up") == 1)
        assert task.process is not None
        first = task.process.pid
        os.kill(first, signal.SIGKILL)
        wait(lambda: supervisor.poll() == [task])
        wait(lambda: task.log.read_text().count("up") == 2)
        assert task.process.pid != first
        group = task.process.pid
    assert not is_running(group)
    wait(lambda: not any(in_group(path, group) or in_group(path, first) for path in Path("/proc").glob("[0-9]*/stat")))


def in_group(path: Path, group: int) -> bool:
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[2]) == group


def wait(happened: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["local", "--nodes", "0"], "whole number >= 1"),
        (["local", "--timeout", "0"], "positive number of seconds"),
        (["local", "--patience", "inf"], "positive number of seconds"),
        (["init", "client", "x"], "required"),
        (["server", "x", "--frobnicate"], "unrecognized arguments"),
        ([], "required"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_one_line(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "find_spec", lambda name: object())
    with pytest.raises(SystemExit) as end:
        main(["deploy", *args])
    shown = capsys.readouterr().err
    assert end.value.code == 2
    assert said in shown
    assert shown.count("\n") == 1


def test_without_flower_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["deploy", "local"])
    assert "pip install 'lightning-fed[flower]'" in capsys.readouterr().err


def test_ids_of_clients_are_numbers_or_text() -> None:
    assert deploy._ids("1,-2") == [1, -2]
    assert deploy._ids("ann,2") == ["ann", "2"]

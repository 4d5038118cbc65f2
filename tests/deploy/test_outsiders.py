"""Outsiders get nowhere: without the key, with another one, beside TLS, with large bodies, on other paths."""

from __future__ import annotations

import datetime
import http.client
import os
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: it needs Python 3.11")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from lightning_fed.deploy import pki
from lightning_fed.deploy.hosting import ServerHost

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.usefixtures("nginx"),
    pytest.mark.skipif("LIGHTNING_FED_DEPLOY" not in os.environ, reason="make test-deploy runs it"),
]


class Door:
    """The server's side of a federation, without nodes and runs, and requests to it."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.host = ServerHost(run.server, run.supervisor)
        self.host.up()
        address, port = run.server.listen.split(":")
        self.address, self.ca = (address, int(port)), run.server.folder / "ca.crt"
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                socket.create_connection(self.address).close()
                break
            except OSError:
                time.sleep(0.1)

    def connection(self, ca: Path | None = None) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(ca or self.ca))
        return http.client.HTTPSConnection(*self.address, context=context, timeout=60)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = self.connection()
        try:
            connection.request("POST", path, body, {"content-type": PROTOBUF_MEDIA_TYPE, **headers})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def memory(self) -> int:
        """Resident bytes of SuperLink and proxy."""
        total = 0
        for name in ("superlink", "proxy"):
            group = self.run.supervisor.tasks[name].process.pid
            for path in Path("/proc").glob("[0-9]*/stat"):
                try:
                    if int(path.read_text().rpartition(")")[2].split()[2]) == group:
                        total += int((path.parent / "statm").read_text().split()[1]) * 4096
                except OSError:
                    continue
        return total


@pytest.fixture
def door(federation: Callable[..., Any]) -> Door:
    return Door(federation(nodes=2))


def key_of(path: Path) -> Any:
    return serialization.load_ssh_private_key(path.read_bytes(), None)


def signed(key: Any, at: datetime.datetime | None = None) -> dict[str, str]:
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    stamp = (at or datetime.datetime.now(datetime.timezone.utc)).isoformat()
    public = b64encode(public_key_to_bytes(key.public_key())).decode()
    signature = b64encode(sign_message(key, stamp.encode())).decode()
    return {FLEET_HTTP_PUBLIC_KEY_HEADER: public, TIMESTAMP_HEADER: stamp, FLEET_HTTP_SIGNATURE_HEADER: signature}


@pytest.mark.timeout(300)
def test_nobody_without_a_registered_key_gets_in(door: Door, tmp_path: Path) -> None:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    mine, stranger = key_of(door.run.nodes[0].folder / "node.key"), ec.generate_private_key(ec.SECP384R1())
    activate = "/v1/fleet/activate-node"

    def hello(key: Any) -> bytes:
        own = public_key_to_bytes(key.public_key())
        return ActivateNodeRequest(public_key=own, heartbeat_interval=30).SerializeToString()

    assert door.post(activate, hello(mine), signed(mine))[0] == 200  # who is registered gets in
    assert door.post(activate, hello(mine), {})[0] == 401  # no key
    assert door.post(activate, hello(stranger), signed(stranger))[0] >= 400  # a key that nobody registered
    assert door.post(activate, hello(mine), signed(stranger))[0] == 401  # a registered key, claimed by another
    old = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=1)
    assert door.post(activate, hello(mine), signed(mine, old))[0] == 401  # recorded an hour ago, replayed
    changed = {**signed(mine), **{name: value for name, value in signed(stranger).items() if "signature" in name}}
    assert door.post(activate, hello(mine), changed)[0] == 401
    other = door.run.server.nodes["node-1"]["id"]
    pull = PullMessagesRequest(node=Node(node_id=other)).SerializeToString()
    assert door.post("/v1/fleet/pull-messages", pull, signed(mine))[0] == 401  # one node's key, another one's messages
    register = RegisterNodeFleetRequest(public_key=public_key_to_bytes(stranger.public_key())).SerializeToString()
    assert door.post("/v1/fleet/register-node", register, signed(stranger))[0] == 403

    pki.make_certificates(tmp_path / "other", ["127.0.0.1"])
    with pytest.raises(ssl.SSLCertVerificationError):  # a node with another CA does not talk to this server
        door.connection(tmp_path / "other" / "ca.crt").request("POST", activate)
    plain = http.client.HTTPConnection(*door.address, timeout=10)
    plain.request("POST", activate, hello(mine), signed(mine))
    assert plain.getresponse().status == 400  # no TLS
    plain.close()

    door.run.server.expel("node-0")
    door.host.register()
    assert door.post(activate, hello(mine), signed(mine))[0] >= 400  # an expelled node's key
    assert door.run.server.expelled == []


PATHS = [
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/v1/runtime/pull-task-input",
    "/v1/responses",
    "/docs",
    "/openapi.json",
    "/health",
    "/",
    "//v1/control/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol%2fstart-run",
    "/v1/fleet/x/../../control/start-run",
    "/V1/FLEET/pull-messages",
    "/v1/fleet/",
    "/v1/fleet/pull-messages/../../control/start-run",
]


@pytest.mark.timeout(300)
def test_only_the_paths_of_nodes_are_reachable_and_large_bodies_leave_memory_flat(door: Door) -> None:
    for path in PATHS:
        for method in ("POST", "GET"):
            connection = door.connection()
            connection.putrequest(method, path, skip_host=False)
            connection.putheader("content-length", "0")
            connection.endheaders()
            assert connection.getresponse().status in (400, 403, 404), path
            connection.close()
    before = door.memory()
    assert sent_until_refused(door, 300 * 2**20, chunked=False) == 413
    assert sent_until_refused(door, 300 * 2**20, chunked=True) in (400, 413, None)
    assert door.memory() - before < 60e6
    # a length that lies: 15 MB are announced, 10 bytes are sent, and the connection goes
    connection = door.connection()
    connection.putrequest("POST", "/v1/fleet/pull-messages")
    connection.putheader("content-length", str(15 * 2**20))
    connection.endheaders(b"0123456789")
    connection.close()
    assert door.memory() - before < 60e6
    assert door.run.supervisor.tasks["superlink"].alive


def sent_until_refused(door: Door, size: int, chunked: bool) -> int | None:
    """The status with which a large body is refused; None if the connection was closed."""
    connection, piece = door.connection(), b"x" * 2**20
    try:
        connection.putrequest("POST", "/v1/fleet/push-object")
        name, value = ("transfer-encoding", "chunked") if chunked else ("content-length", str(size))
        connection.putheader(name, value)
        connection.putheader("content-type", PROTOBUF_MEDIA_TYPE)
        connection.endheaders()
        try:
            for _ in range(size // len(piece)):
                connection.send(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        except OSError:
            pass
        try:
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
    finally:
        connection.close()

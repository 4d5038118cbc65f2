"""What a supervisor starts ends with it, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = "#!/bin/sh\ntrap 'touch ended; exit' TERM\ntouch begun\nwhile :; do sleep 0.1; done\n"
SUPERVISOR = """
import os, time
from lightning_fed.deploy.supervisor import _popen
_popen([os.path.abspath("nginx")], os.environ, open("log", "w"))
time.sleep(60)
"""


def appears(path: Path, seconds: float = 60.0) -> bool:
    limit = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    return path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death on Linux alone")
def test_the_proxy_is_asked_to_end_so_that_its_worker_does_not_keep_the_port(tmp_path: Path) -> None:
    (tmp_path / "nginx").write_text(SCRIPT)
    (tmp_path / "nginx").chmod(0o755)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR], cwd=tmp_path, env=os.environ)
    try:
        assert appears(tmp_path / "begun")
    finally:
        supervisor.kill()
        supervisor.wait()
    assert appears(tmp_path / "ended")

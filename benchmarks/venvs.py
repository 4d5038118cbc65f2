"""One virtual environment per peer, made on first use; torch and what else is missing there is the project's own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
VENVS, REQUIREMENTS = HERE / ".venvs", HERE / "environments"


class UnavailableError(Exception):
    """An environment could not be made; says why."""


def interpreter(environment: str, needs_torch: bool) -> str:
    """The Python of an environment; the project's own is called ''."""
    if not environment:
        return sys.executable
    home, wanted = VENVS / environment, (REQUIREMENTS / f"{environment}.txt").read_text()
    python, stamp = home / "bin" / "python", home / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making the environment of {environment} ...", flush=True)
        _call(sys.executable, "-m", "venv", str(home))
        if needs_torch:  # torch takes gigabytes: it is borrowed
            packages = next(home.glob("lib/python*/site-packages"))
            (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _call(str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS / f"{environment}.txt"))
        stamp.write_text(wanted)
    return str(python)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UnavailableError(f"cannot be installed: {lines[-1] if lines else 'pip failed'}"[:300])

"""Compile C code for this processor, and cache the libraries for later runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from lightning_fed.core.cache import default_cache, digest_of, is_own_file, private_folder, write_through

#: Seconds after which a compiler is considered stuck.
PATIENCE = 120
# no contraction: with fused products and sums, a * b - a * b would not be 0; matrix products switch it on again
_FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fopenmp-simd", "-fno-math-errno", "-shared", "-fPIC"]


@cache
def built(source: str) -> ctypes.CDLL:
    """Compile and load a source, or load its cached library; raises OSError or SubprocessError if that fails."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler")
    key = hashlib.sha256("\n".join([source, compiler, *_FLAGS, _processor()]).encode()).hexdigest()
    folder = private_folder(default_cache() / "native")
    library, checksum = folder / f"{key}.so", folder / f"{key}.sha256"
    if is_intact(library, checksum):
        with suppress(OSError):  # built on another machine that shares this cache: compile again
            return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=folder) as room:
        code, made = Path(room) / "steps.c", Path(room) / "steps.so"
        code.write_text(source)
        command = [compiler, *_FLAGS, str(code), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
        made.chmod(0o700)
        note = Path(room) / "steps.sha256"
        note.write_text(digest_of(made))
        for file in (made, note):
            write_through(file)
        made.replace(library)  # atomic, because other processes may load it at the same time
        note.replace(checksum)
    return ctypes.CDLL(str(library))


def is_intact(library: Path, checksum: Path) -> bool:
    """Whether a library belongs to this user and matches its checksum: loading a damaged one would kill the process."""
    if not is_own_file(library) or not is_own_file(checksum):
        return False
    return checksum.read_text() == digest_of(library)


@cache
def _processor() -> str:
    """Describe the processor for the cache key, because ``-march=native`` depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

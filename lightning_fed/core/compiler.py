"""Compile C code at its first use, and cache the libraries for later runs.

Libraries are called through ctypes and know nothing of Python, so the package ships sources and serves all platforms.
Used with gcc on Linux; the parts for macOS and Windows are untried.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from lightning_fed.core.cache import clean, default_cache, digest_of, is_own_file, private_folder, write_through

#: Seconds after which a compiler is considered stuck.
PATIENCE = 120
#: Days without use, and bytes in all, after which libraries are removed from the cache; a library takes about 20 KB.
KEPT_DAYS, KEPT_BYTES = 60, 100 * 2**20
#: Compilers that are tried after ``$CC``. Not MSVC's, because the code uses GNU C's vectors and 128-bit integers.
COMPILERS = ("cc", "gcc", "clang")
#: The reason that is told without a compiler.
MISSING = "no C compiler was found (of $CC, cc, gcc and clang)"

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_EXPORT = "__declspec(dllexport)" if sys.platform == "win32" else '__attribute__((visibility("default")))'
_LIBRARY = ["-shared", f"-DEXPORT={_EXPORT}", *([] if sys.platform == "win32" else ["-fPIC", "-lm"])]
# for this machine alone. No contraction: with fused products and sums, a * b - a * b would not be 0; matrix products
# switch it on again. Compilers for ARM name the processor by another option.
_NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
_FLAGS = ["-O3", _NATIVE, "-ffp-contract=off", "-fopenmp-simd", "-fno-math-errno"]
# for code that chooses among the processor's instructions itself, when it runs. -fwrapv, with which Python's extensions
# are compiled, keeps the bits of results that earlier versions gave.
_PORTABLE = ["-O3", "-fopenmp-simd", "-fwrapv"]


class NoCompilerError(OSError):
    """There is no C compiler."""


def find_compiler() -> str | None:
    """The path of the C compiler: of what ``$CC`` names, else of the first of `COMPILERS` that exists."""
    asked = os.environ.get("CC")
    return next((path for name in (asked, *COMPILERS) if name and (path := shutil.which(name))), None)


@cache
def built(source: str, portable: bool = False) -> ctypes.CDLL:
    """Compile and load a source, or load its cached library; raises OSError or SubprocessError if that fails.

    Args:
        source: C code; ``EXPORT`` marks its functions.
        portable: compile for any processor of this kind, not for this one.
    """
    compiler, flags = find_compiler(), _PORTABLE if portable else _FLAGS
    if compiler is None:
        raise NoCompilerError(MISSING)
    key = hashlib.sha256("\n".join([source, compiler, *flags, *_LIBRARY, _processor()]).encode()).hexdigest()
    folder = private_folder(default_cache() / "native")
    library, checksum = folder / f"{key}{_SUFFIX}", folder / f"{key}.sha256"
    if is_intact(library, checksum):
        with suppress(OSError):
            os.utime(library)  # its last use, by which the cache is cleaned
        with suppress(OSError):  # built on another machine that shares this cache: compile again
            return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=folder) as room:
        _compile([compiler, *flags], source, Path(room), library, checksum)
    loaded = ctypes.CDLL(str(library))
    clean(folder, KEPT_DAYS, KEPT_BYTES)
    return loaded


def _compile(command: list[str], source: str, room: Path, library: Path, checksum: Path) -> None:
    """Compile in a folder of its own, and move what is complete to its place."""
    code, made, note = room / "code.c", room / f"code{_SUFFIX}", room / "code.sha256"
    code.write_text(source)
    whole = [*command, str(code), "-o", str(made), *_LIBRARY]
    subprocess.run(whole, check=True, capture_output=True, text=True, timeout=PATIENCE)
    made.chmod(0o700)
    note.write_text(digest_of(made))
    for file in (made, note):
        write_through(file)
    try:
        made.replace(library)  # atomic, because other processes may load it at the same time
        note.replace(checksum)
    except PermissionError:  # Windows does not replace a library that another process has loaded
        if not is_intact(library, checksum):
            raise


def is_intact(library: Path, checksum: Path) -> bool:
    """Whether a library belongs to this user and matches its checksum: loading a damaged one would kill the process."""
    if not is_own_file(library) or not is_own_file(checksum):
        return False
    try:
        return checksum.read_text() == digest_of(library)
    except FileNotFoundError:  # another process has just cleaned the cache
        return False


@cache
def _processor() -> str:
    """Describe the processor for the cache key, because code for this machine depends on it."""
    machine = f"{platform.system()} {platform.machine()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{machine} {platform.processor()}"
    return "\n".join([machine, *sorted({ln for ln in lines if ln.startswith(("model name", "flags", "Features"))})])

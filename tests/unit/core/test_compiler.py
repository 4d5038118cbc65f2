"""Libraries that are compiled at first use: kept, cleaned, checked, and never in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.c_steps import needs_compiler

from lightning_fed.core import compiler, draws
from lightning_fed.core.cache import clean, default_cache

DAY = 24 * 3600


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path, name: str, age: float, size: int = 10) -> None:
    """A library and its checksum, last used so many days ago."""
    for suffix in (".so", ".sha256"):
        path = folder / f"{name}{suffix}"
        path.write_bytes(b"0" * size)
        os.utime(path, (time.time() - age * DAY,) * 2)


@needs_compiler
def test_a_compiler_with_options_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    monkeypatch.setenv("CC", "ccache cc -m64")
    assert compiler.built.__wrapped__("int one(void) { return 1; }").one() == 1


@needs_compiler
def test_what_was_compiled_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "int two(void) { return 2; }"
    assert compiler.built.__wrapped__(source).two() == 2
    monkeypatch.setattr(subprocess, "run", None)
    assert compiler.built.__wrapped__(source).two() == 2
    assert sorted(file.suffix for file in (own_cache / "native").iterdir()) == [".sha256", ".so"]


@needs_compiler
def test_what_is_damaged_is_compiled_again(own_cache: Path) -> None:
    source = "int three(void) { return 3; }"
    assert compiler.built.__wrapped__(source).three() == 3
    (library,) = (own_cache / "native").glob("*.so")
    whole = library.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"not a library", whole[: len(whole) // 3], bytes(flipped), b""):
        library.unlink()  # it is still mapped: to write into it would change what is running
        library.write_bytes(damaged)
        assert compiler.built.__wrapped__(source).three() == 3
        assert library.read_bytes() != damaged


@needs_compiler
def test_libraries_of_others_are_not_loaded(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = "int five(void) { return 5; }", own_cache / "native"
    folder.mkdir(parents=True, mode=0o777)
    folder.chmod(0o777)
    assert compiler.built.__wrapped__(source).five() == 5
    assert folder.stat().st_mode & 0o777 == 0o700
    (library,), (checksum,) = folder.glob("*.so"), folder.glob("*.sha256")
    assert compiler.is_intact(library, checksum)
    library.chmod(0o722)  # others may write it
    assert not compiler.is_intact(library, checksum)
    library.chmod(0o700)
    checksum.unlink()
    assert not compiler.is_intact(library, checksum)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(OSError, match="belongs to another user"):
        compiler.built.__wrapped__(source)


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path, own_cache: Path) -> None:
    own_cache.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (own_cache / "native").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is not a folder, but a link"):
        compiler.private_folder(own_cache / "native")


@needs_compiler
def test_many_may_compile_the_same_at_once(own_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(compiler.built.__wrapped__, ["int three(void) { return 3; }"] * 4))
    assert [library.three() for library in libraries] == [3] * 4
    assert len(list((own_cache / "native").glob("*.so"))) == 1


@needs_compiler
def test_processes_may_compile_the_same_at_once(own_cache: Path) -> None:
    code = "from lightning_fed.core.compiler import built; print(built('int four(void) { return 4; }').four())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["4\n"] * 2
    assert [Path(name).suffix for name in files_in(own_cache / "native")] == [".sha256", ".so"]


@needs_compiler
def test_the_cache_is_cleaned_when_something_is_compiled(own_cache: Path) -> None:
    folder = own_cache / "native"
    folder.mkdir(parents=True)
    write(folder, "old", compiler.KEPT_DAYS + 1)
    write(folder, "new", compiler.KEPT_DAYS - 1)
    assert compiler.built.__wrapped__("int six(void) { return 6; }").six() == 6
    assert "old.so" not in files_in(folder)
    assert {"new.so", "new.sha256"} < set(files_in(folder))
    assert len(files_in(folder)) == 4


@needs_compiler
def test_a_library_that_is_used_stays_young(own_cache: Path) -> None:
    source = "int seven(void) { return 7; }"
    compiler.built.__wrapped__(source)
    (library,) = (own_cache / "native").glob("*.so")
    os.utime(library, (0, 0))
    compiler.built.__wrapped__(source)
    assert time.time() - library.stat().st_mtime < 60


def test_what_is_old_or_too_much_is_removed_in_pairs(tmp_path: Path) -> None:
    for name, age in (("a", 1), ("b", 5), ("c", 3), ("d", 40)):
        write(tmp_path, name, age, size=50)
    clean(tmp_path, days=30, most_bytes=1000)
    assert files_in(tmp_path) == [f"{name}.{suffix}" for name in "abc" for suffix in ("sha256", "so")]
    clean(tmp_path, days=30, most_bytes=200)
    assert files_in(tmp_path) == ["a.sha256", "a.so", "c.sha256", "c.so"]


def test_folders_of_interrupted_compilers_go_after_a_day(tmp_path: Path) -> None:
    for name, age in (("stale", 2), ("busy", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.c").touch()
        os.utime(tmp_path / name, (time.time() - age * DAY,) * 2)
    clean(tmp_path, days=30, most_bytes=0)
    assert files_in(tmp_path) == ["busy"]


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("darwin", ("Library", "Caches", "lightning_fed")), ("win32", ("AppData", "Local", "lightning_fed", "Cache"))],
)
def test_each_system_has_its_own_place(
    platform: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert default_cache() == own_cache
    for name in ("LIGHTNING_FED_CACHE", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache() == Path.home().joinpath(*expected)


def test_without_a_compiler_numpy_draws_the_same(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    given = 1, 2, ["a", "b"], [7, 30], [2, 1]
    expected = draws.epoch_orders(*given)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    assert compiler.find_compiler() is None
    with pytest.raises(compiler.NoCompilerError, match="no C compiler was found"):
        compiler.built.__wrapped__("int eight(void) { return 8; }")
    monkeypatch.setattr(draws, "built", compiler.built.__wrapped__)
    monkeypatch.setattr(draws, "_compiled", draws._compiled.__wrapped__)
    assert draws._compiled() is None
    for ours, numpys in zip(expected, draws.epoch_orders(*given), strict=True):
        assert np.array_equal(ours, numpys)

"""The sdist makes a pure wheel, which works where it is unpacked: with its configs, data and C sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("lightning_fed", "models", "datamodules", "configs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")

pytest.importorskip("setuptools", "77")


def build(what: str, source: Path, target: Path) -> Path:
    """What a build frontend would do, without an environment of its own."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", code, str(target)]
    done = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as frontends do."""
    room = tmp_path_factory.mktemp("wheel")
    clone, unpacked = room / "clone", room / "unpacked"
    for name in SOURCES:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy(ROOT / name, clone / name)
    with tarfile.open(build("sdist", clone, room)) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, room)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, which borrows all other packages."""
    room = tmp_path_factory.mktemp("environment")
    venv.create(room, symlinks=True)
    (packages,) = room.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # to unpack is to install, for a pure wheel
        archive.extractall(packages)
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    return room / "bin" / "python"


def run(python: Path, *words: str) -> str:
    done = subprocess.run([str(python), "-I", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_pure_and_has_every_file(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    here = {
        path.relative_to(ROOT)
        for name in SOURCES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".yaml", ".txt", ".typed")
    }
    expected = {str(path if path.parts[0] == "lightning_fed" else "lightning_fed" / path) for path in here}
    assert expected - names == set()
    assert {name for name in names if ".dist-info/" not in name} - expected == set()


CODE = """
import sys
from importlib.resources import files
import lightning_fed
from lightning_fed.core import compiler, draws
from lightning_fed.datamodules import Synthetic
from lightning_fed.datamodules.femnist import glyphs
assert lightning_fed.__file__.startswith(sys.prefix), lightning_fed.__file__
assert files("lightning_fed.datamodules.femnist").joinpath("glyphs.txt").is_file()
assert (draws._compiled() is None) == (compiler.find_compiler() is None)
print(files("lightning_fed.configs").joinpath("synthetic_fedadmm.yaml"))
"""


@pytest.mark.skipif(os.name == "nt", reason="environments are laid out otherwise on Windows")
def test_the_wheel_fits_from_its_own_configs(python: Path) -> None:
    config = run(python, "-W", "ignore", "-c", CODE).splitlines()[-1]
    run(python, "-m", "lightning_fed", "fit", "--config", config, "--trainer.fast_dev_run=true")


@pytest.mark.skipif(os.name == "nt", reason="environments are laid out otherwise on Windows")
def test_the_metadata_are_complete(python: Path) -> None:
    code = "from importlib.metadata import metadata as m; print(*m('lightning-fed').get_all('Provides-Extra'))"
    assert set(run(python, "-c", code).split()) == {
        *("comet", "dev", "docs", "flower", "huggingface", "lightning", "mlflow", "optuna", "pandas", "rich")
    }


@pytest.mark.skipif(os.name == "nt", reason="environments are laid out otherwise on Windows")
def test_a_clone_in_the_current_folder_that_hides_the_installed_package_says_so(python: Path) -> None:
    done = subprocess.run([str(python), "-c", "import lightning_fed"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Install the clone with `pip install -e .`, or run from another folder." in done.stderr

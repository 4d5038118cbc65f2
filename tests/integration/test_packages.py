"""``lightning.pytorch`` and ``pytorch_lightning``: either works, with the same bits; a mixture is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lightning import is_overridden, package

SCRIPT = Path(__file__).parents[1] / "helpers" / "mixtures"  # a folder with __main__.py, which doctests pass over
TRAINERS = {name: trainer for name, (trainer, _) in package.PARTS.items()}
HERE = [name for name in TRAINERS if package._is_installed(name)]
BOTH = pytest.mark.skipif(len(HERE) < 2, reason=f"only {HERE} is installed")


def run_script(name: str, folder: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Run the script with one package, in a process that has no variable set and no alias between the packages."""
    other = next((TRAINERS[known] for known in HERE if known != name), "")
    hidden = (package.VARIABLE, "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    words = [sys.executable, SCRIPT, TRAINERS[name], other, folder, *([checkpoint] if checkpoint else [])]
    subprocess.run(list(map(str, words)), env=environment, check=True, cwd=folder, capture_output=True, text=True)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script found with each package; each but the first resumes the checkpoint of the one before, too."""
    results, checkpoint = {}, None
    for name in HERE:
        folder = tmp_path_factory.mktemp(name)
        results[name] = run_script(name, folder, checkpoint)
        checkpoint = folder / "first" / "last.ckpt"
    return results


@pytest.mark.parametrize("name", TRAINERS)
def test_a_fit_resumes_with_the_same_bits(found: dict[str, dict[str, Any]], name: str) -> None:
    if name not in found:
        pytest.skip(f"{name} is not installed")
    assert found[name]["whole"] == found[name]["resumed"]


@BOTH
def test_both_packages_give_the_same_bits_and_read_the_others_checkpoints(found: dict[str, dict[str, Any]]) -> None:
    first, second = (found[name] for name in HERE)
    assert first["whole"] == second["whole"] == second["resumed from the other"]


@BOTH
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    ("case", "what", "change"),
    [
        ("module", "Net (which derives from LightningModule) is of {other}", "from {trainer} import LightningModule"),
        ("Trainer", "The Trainer that was given Net is of {other}", "from {trainer} import Trainer"),
        ("Trainer and module", "The Trainer that was given Synthetic is of {other}", "from {trainer} import Trainer"),
        ("callback", "callback EarlyStopping is of {other}", "from {trainer}.callbacks import EarlyStopping"),
        ("logger", "logger CSVLogger is of {other}", "from {trainer}.loggers import CSVLogger"),
        ("late Trainer", "The Trainer that was given Synthetic is of {other}", "from {trainer} import Trainer"),
        ("command line", "given Synthetic is of {other}", "from {trainer}.cli import LightningCLI"),
        (
            "module of a command line",
            "Net (which derives from LightningModule) is of {other}",
            "from {trainer} import LightningModule",
        ),
        (
            "config",
            "Stop (which derives from EarlyStopping) is of {other}",
            "from {trainer}.callbacks import EarlyStopping",
        ),
    ],
)
def test_a_mixture_names_the_import_to_change(
    found: dict[str, dict[str, Any]], name: str, case: str, what: str, change: str
) -> None:
    (other,) = set(TRAINERS) - {name}
    names = {"trainer": TRAINERS[name], "other": TRAINERS[other]}
    error = found[name][case]
    assert error.startswith("lightning-fed fit: error: " if case == "config" else "TypeError: ")
    assert what.format(**names) in error
    assert f"works with {TRAINERS[name]} here (it was imported before lightning_fed)" in error
    assert f"Change the import to: {change.format(**names)}." in error
    assert f"LIGHTNING_FED_PACKAGE={other}" in error


@BOTH
@pytest.mark.parametrize("name", TRAINERS)
def test_a_callback_that_only_has_hooks_of_the_other_package_works(found: dict[str, dict[str, Any]], name: str) -> None:
    assert (found[name]["hooks"], found[name]["hooks called"]) == ("no error", True)
    assert found[name]["overridden"] == [True, False]


@BOTH
@pytest.mark.parametrize("name", TRAINERS)
def test_class_paths_of_configs_mean_the_package_that_is_used(found: dict[str, dict[str, Any]], name: str) -> None:
    assert found[name]["path"] == f"--trainer.callbacks={TRAINERS[name]}.callbacks.ModelCheckpoint"


def test_other_text_of_configs_stays() -> None:
    other = package.PARTS[package.OTHER][0]
    for text in (f"runs/{other}.Run", f"my.{other}.Run", f"dirpath: {other}", f"{other}.runs/x", f"{other}.Run.ckpt"):
        assert package.in_this_package(text) == text


# -- the choice ----------------------------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Decide as a process would that has imported and installed these packages."""

    def chosen(imported: str = "", installed: str = "", variable: str | None = None) -> tuple[str, str]:
        modules = dict.fromkeys(imported.split(), sys)
        monkeypatch.setattr(package.sys, "modules", modules)
        monkeypatch.setattr(package, "_is_installed", lambda name: name in installed.split())
        monkeypatch.delenv(package.VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(package.VARIABLE, variable)
        try:
            return package.decide()
        finally:
            monkeypatch.undo()

    return chosen


BOTH_INSTALLED = "lightning pytorch_lightning"


@pytest.mark.parametrize(
    ("imported", "installed", "variable", "package", "why"),
    [
        ("lightning.pytorch", BOTH_INSTALLED, "pytorch_lightning", "pytorch_lightning", "LIGHTNING_FED_PACKAGE="),
        ("pytorch_lightning", BOTH_INSTALLED, "lightning", "lightning", "LIGHTNING_FED_PACKAGE="),
        ("pytorch_lightning", BOTH_INSTALLED, None, "pytorch_lightning", "it was imported"),
        ("pytorch_lightning", BOTH_INSTALLED, "", "pytorch_lightning", "it was imported"),
        ("lightning.pytorch", BOTH_INSTALLED, None, "lightning", "it was imported"),
        ("pytorch_lightning lightning.pytorch", BOTH_INSTALLED, None, "lightning", "both packages were imported"),
        ("", "pytorch_lightning", None, "pytorch_lightning", "it was installed"),
        ("", "lightning", None, "lightning", "it was installed"),
        ("", BOTH_INSTALLED, None, "lightning", "both packages were installed"),
    ],
)
def test_variable_then_imported_then_installed(
    choose: Any, imported: str, installed: str, variable: str | None, package: str, why: str
) -> None:
    found, reason = choose(imported, installed, variable)
    assert found == package
    assert reason.startswith(why)


def test_a_package_that_is_barred_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for trainer in TRAINERS.values():
        monkeypatch.setitem(sys.modules, trainer, None)
    for name in TRAINERS:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delenv(package.VARIABLE)
    with pytest.raises(ImportError, match="needs Lightning"):
        package.decide()


def test_what_cannot_be_used_is_refused(choose: Any) -> None:
    with pytest.raises(ImportError, match="must be lightning or pytorch_lightning, got 'torch'"):
        choose(installed=BOTH_INSTALLED, variable="torch")
    with pytest.raises(ImportError, match=r"lightning is not installed\. Run: pip install lightning"):
        choose(installed="pytorch_lightning", variable="lightning")
    with pytest.raises(ImportError, match="needs Lightning"):
        choose()


def test_a_folder_of_the_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lightning").mkdir()
    monkeypatch.setattr(package, "find_spec", lambda name: find_spec(name) if name != "lightning" else spec)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "lightning")]})
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    assert not package._is_installed("lightning")


def test_a_callback_that_is_no_callback_of_lightning_is_compared() -> None:
    class Duck:
        def on_after_backward(self, *_: Any) -> None:
            pass

    assert is_overridden("on_after_backward", Duck())
    assert not is_overridden("on_before_backward", Duck())

"""Files for GitHub and PyPI: they parse, and agree with pyproject.toml and each other."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_fed import __version__

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
YAML = [ROOT / "CITATION.cff", *sorted(GITHUB.rglob("*.yml"))]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines]
    return {each.name.lower(): each for each in found}


def declared() -> dict[str, Requirement]:
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.M | re.S)
    return requirements(re.findall(r'"(.+)"', block))


def pinned() -> dict[str, Requirement]:
    lines = (GITHUB / "oldest.txt").read_text().splitlines()
    return requirements([line for line in lines if line and not line.startswith("#")])


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert isinstance(load(path), dict)


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").iterdir()), ids=lambda path: path.name)
def test_jobs_have_steps_and_need_jobs_that_exist(path: Path) -> None:
    workflow = load(path)
    assert True in workflow  # the key `on`, which YAML 1.1 reads as a boolean
    jobs = workflow["jobs"]
    for job in jobs.values():
        assert job["runs-on"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        needs = job.get("needs", [])
        assert {needs} <= jobs.keys() if isinstance(needs, str) else set(needs) <= jobs.keys()


def test_make_targets_and_tests_of_workflows_exist() -> None:
    text = "\n".join(path.read_text() for path in (GITHUB / "workflows").iterdir())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    used = [word for line in re.findall(r"run: make (.+)", text) for word in line.split()]
    assert used
    assert set(used) <= set(targets)
    paths = re.findall(r"tests/[\w/.]+", text)
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_the_suite_runs_with_every_python_that_is_declared() -> None:
    tested = load(GITHUB / "workflows" / "tests.yml")["jobs"]["suite"]["strategy"]["matrix"]["python"]
    assert tested == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    allowed, oldest = declared(), pinned()
    assert allowed.keys() <= oldest.keys()
    for name, requirement in allowed.items():
        (floor,) = (part.version for part in requirement.specifier if part.operator == ">=")
        (exact,) = (part.version for part in oldest[name].specifier)
        assert Version(exact).release[: len(Version(floor).release)] == Version(floor).release, name


def test_the_oldest_job_installs_what_its_tests_import() -> None:
    """At the top of files, where a missing package ends the job; imports in functions are guarded by importorskip."""
    (job,) = re.findall(r"pytest .*-W default (.+)", (GITHUB / "workflows" / "tests.yml").read_text())
    files = [file for folder in ("tests/helpers", *job.split()) for file in (ROOT / folder).rglob("*.py")]
    imported = {name for file in files for name in top_imports(file)}
    own = {"helpers", "conftest", "lightning_fed"}
    distributions = packages_distributions()
    missing = {
        name
        for name in imported - own - sys.stdlib_module_names
        if not {distribution.lower() for distribution in distributions.get(name, [name])} & pinned().keys()
    }
    assert missing == set()


def top_imports(file: Path) -> set[str]:
    """The packages that a file imports at its top."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("package", ["pytorch-lightning", "lightning"])
def test_lightning_accepts_the_oldest_versions(package: str) -> None:
    """Or pip refuses to install them."""
    try:
        needed = [Requirement(line) for line in metadata.requires(package) or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    versions = {name: exact.version for name, each in pinned().items() for exact in each.specifier}
    known = [each for each in needed if each.name.lower() in versions]
    refused = [str(each) for each in known if versions[each.name.lower()] not in each.specifier]
    assert not refused


def test_the_citation_is_of_this_version() -> None:
    assert load(ROOT / "CITATION.cff")["version"] == __version__

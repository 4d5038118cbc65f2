"""Every page of docs/ has its place in the site, its links lead somewhere, and what it names in the text exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ("api/", "gallery/")  # by make docs
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path
    for path in sorted(DOCS.rglob("*.md"))
    if not path.relative_to(DOCS).as_posix().startswith(GENERATED)
}
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES.values()]


def prose(page: Path) -> str:
    """A page without its code, in which brackets mean other things."""
    return re.sub(r"`[^`\n]+`", "code", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MyST give to headings: lower case, no punctuation, hyphens for blanks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    headings = (heading.replace("`", "").lower() for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in target]


def broken(page: Path) -> list[str]:
    found = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def entries(page: Path) -> list[str]:
    """What the toctrees of a page list, as patterns from docs/."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.S | re.M)
    lines = (line.strip() for tree in trees for line in tree.splitlines())
    return [line for line in lines if line and not line.startswith(":")]


def reference() -> list[str]:
    """The modules of the reference."""
    return re.findall(r"^ +(lightning_fed[\w.]*)$", (DOCS / "reference.md").read_text(), re.M)


def callables() -> dict[str, object]:
    """Public classes and functions by name, and those of Lightning that pages speak of."""
    modules = [import_module(path) for path in reference()]
    found = {name: getattr(module, name) for module in modules for name in vars(module) if name[0].isupper()}
    return found | {"Trainer": Trainer, "EarlyStopping": EarlyStopping, "ModelCheckpoint": ModelCheckpoint}


def calls(text: str) -> Iterator[ast.Call]:
    """Calls such as ``FedADMM(eta=1.0)`` in the code within sentences."""
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        try:
            tree = ast.parse(code.replace("\\|", "|"), mode="eval")
        except SyntaxError:
            continue  # no expression: a command, a formula, an option without a value
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def unknown_arguments(text: str) -> list[str]:
    known, found = callables(), []
    for call in calls(text):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if not callable(known.get(name)):
            continue
        parameters = inspect.signature(known[name]).parameters  # type: ignore[arg-type]  # is callable
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            found += [f"{name}({word.arg}=)" for word in call.keywords if word.arg and word.arg not in parameters]
    return found


def missing_names(text: str) -> list[str]:
    """Paths such as ``lightning_fed.prox.L1`` in the text that lead to nothing."""
    return [path for path in re.findall(r"`(lightning_fed(?:\.\w+)+)[`(]", text) if not _exists(path)]


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    try:
        return not module or hasattr(import_module(module), name) or bool(import_module(path))
    except ModuleNotFoundError:
        return False


def test_arguments_that_the_text_names_exist() -> None:
    assert sum(1 for page in LINKED for _ in calls(page.read_text())) > 150
    assert {page.name: found for page in LINKED if (found := unknown_arguments(page.read_text()))} == {}
    assert unknown_arguments("`FederatedServer(evaluate_evry=1)` and `Trainer(max_epochs=1)`") == [
        "FederatedServer(evaluate_evry=)"
    ]


def test_signatures_on_pages_of_algorithms_are_those_of_the_code() -> None:
    shown = {}
    for name, page in PAGES.items():
        if name.startswith("algorithms/"):
            for call in calls(page.read_text().split("$$")[0]):
                shown |= {call.func.id: call.keywords} if isinstance(call.func, ast.Name) else {}
    algorithms = import_module("lightning_fed.algorithms")
    shown = {name: words for name, words in shown.items() if name in algorithms.__all__}
    assert len(shown) == 20
    for name, words in shown.items():
        parameters = inspect.signature(getattr(algorithms, name)).parameters.values()
        defaults = {word.arg: ast.unparse(word.value) for word in words}
        assert defaults == {parameter.name: repr(parameter.default) for parameter in parameters}, name
        ordered = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
        assert [name for name in defaults if name in ordered] == ordered, name


def test_names_that_the_text_gives_by_their_path_exist() -> None:
    pages = [page for page in LINKED if page.name != "CHANGELOG.md"]  # which tells of names that are gone
    assert {page.name: found for page in pages if (found := missing_names(page.read_text()))} == {}
    assert missing_names("`lightning_fed.models.ResNet18` `lightning_fed.prox.L1(0.1)`") == [
        "lightning_fed.models.ResNet18"
    ]


def test_the_landing_page_and_the_readme_begin_with_the_same_code() -> None:
    first = [re.search(r"```python\n(.*?)```", page.read_text(), re.S) for page in (ROOT / "README.md", PAGES["index"])]
    assert [match[1] for match in first if match] == [first[0][1]] * 2  # type: ignore[index]  # README has code


def test_every_page_has_its_place_in_a_table_of_contents() -> None:
    listed = [entry for page in PAGES.values() for entry in entries(page)]
    assert len(PAGES) > 40
    missing = [name for name in PAGES if name != "index" and not any(fnmatch(name, entry) for entry in listed)]
    assert not missing, f"list {missing} in a toctree of docs/index.md"


def test_every_relative_link_leads_somewhere() -> None:
    assert sum(len(links(page)) for page in LINKED) > 100
    assert {page.name: broken(page) for page in LINKED if broken(page)} == {}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[x](#a-b-c) [y](#a) [z](gone.md) ![w](gone.png) `[v](code)` [u](page.md#a-b-c)\n")
    assert broken(page) == ["#a", "gone.md", "gone.png"]


def test_every_example_begins_with_a_title_for_the_gallery() -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert len(scripts) > 5
    untitled = [path.name for path in scripts if not re.match(r'"""\S.*\n={10,}\n\n\S', path.read_text())]
    assert not untitled, f"begin the docstrings of {untitled} with a title and a line of ==="

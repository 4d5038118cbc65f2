"""Every page of docs/ has its place in the site, and every relative link of a page leads somewhere."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

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

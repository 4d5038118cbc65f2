"""Check the built site: every link to a page, an anchor, an image, a script or a style sheet leads somewhere.

Addresses outside the site are not fetched.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, and the addresses it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.targets += [values[name] for name in ("href", "src") if name in values]


def broken_links(site: Path) -> list[str]:
    """Each broken link of a site as ``page: target``."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    return [
        f"{path.relative_to(site.resolve())}: {target}"
        for path, page in pages.items()
        for target in sorted(set(page.targets))
        if not _leads_somewhere(target, path, pages)
    ]


def _leads_somewhere(target: str, path: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if file in pages:
        return unquote(parts.fragment) in pages[file].anchors
    return file.is_file()


def main() -> None:
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        sys.exit(f"{site} holds no site: run make docs")
    broken = broken_links(site)
    print(*broken, sep="\n", end="\n" if broken else "")
    sys.exit(f"{len(broken)} links of {site} lead nowhere" if broken else 0)


if __name__ == "__main__":
    main()

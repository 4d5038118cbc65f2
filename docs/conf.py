"""The documentation site: `make docs` builds it into build/site, with warnings as errors."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path

os.environ["LIGHTNING_FED_PACKAGE"] = "pytorch_lightning"  # which is what examples import
os.environ.setdefault("WANDB_MODE", "offline")

from lightning_fed import __version__


def shown_names() -> dict[str, list[str]]:
    """The names of each module of the reference; a thing with several public paths is shown once."""
    page = Path(__file__).with_name("reference.md").read_text()
    seen: set[int] = set()
    shown: dict[str, list[str]] = {}
    paths = re.findall(r"^ +(lightning_fed[\w.]*)$", page, re.M)
    for path in sorted(paths, key=["lightning_fed.core", "lightning_fed"].__contains__, reverse=True):
        module = import_module(path)
        defined = (name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__)
        names = getattr(module, "__all__", [name for name in defined if not name.startswith("_")])
        shown[path] = [name for name in names if id(getattr(module, name)) not in seen]
        seen.update(id(getattr(module, name)) for name in names)
    return shown


project = "lightning-fed"
author = "the lightning-fed contributors"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax is copied into the site: formulas need no network
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]

# pages: our Markdown files; api/ and gallery/ are generated
exclude_patterns = ["_templates", "gallery/*.py", "gallery/*.ipynb", "gallery/*.md5", "gallery/*.zip"]
templates_path = ["_templates"]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4  # links such as results.md#the-family-compared, as on GitHub

# reference
add_module_names = False
autosummary_generate = True
autosummary_ignore_module_all = False  # a module's reference is its __all__
autosummary_imported_members = True
autosummary_context = {"shown": shown_names()}
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "code"  # single backticks in docstrings
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100  # longer ones have a line for each argument

# gallery
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"(constrained|side_by_side|sequences|your_model)\.py$",  # executed: those that take seconds
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
    "thumbnail_size": (520, 364),
    "write_computation_times": False,  # its page loads scripts from elsewhere
}

# looks
html_theme = "furo"
html_title = "lightning-fed"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#5b2a86", "color-brand-content": "#5b2a86"},
    "dark_css_variables": {"color-brand-primary": "#c9a4f0", "color-brand-content": "#c9a4f0"},
}
mathjax_path = "mathjax/tex-chtml.js"
pygments_style = "friendly"
pygments_dark_style = "monokai"

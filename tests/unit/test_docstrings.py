"""Every public name tells what it does and shows it: a docstring, an example that runs, a sentence for each method."""

from __future__ import annotations

import doctest
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from helpers.docstrings import Public, as_rest, has_example, methods, public_names, written

import lightning_fed

#: The modules of the reference
MODULES = re.findall(
    r"^ +(lightning_fed[\w.]*)$", (Path(__file__).parents[2] / "docs" / "reference.md").read_text(), re.M
)

#: Sphinx's own roles, of which docutils knows nothing
ROLES = ["attr", "class", "doc", "exc", "func", "meth", "mod", "ref"]


def test_the_reference_has_all_public_modules() -> None:
    """A room whose names users import is in the reference, or its names are in that of another."""
    assert len(MODULES) > 15
    shown = {id(name.value) for module in MODULES for name in public_names(module)}
    rooms = [path.parent for path in Path(lightning_fed.__file__).parent.glob("*/__init__.py")]
    inner = {"cli", "lightning"}  # the console script, described in docs/command_line.md; the door to Lightning
    modules = [import_module(f"lightning_fed.{room.name}") for room in rooms if room.name not in inner]
    names = [name for module in modules if hasattr(module, "__all__") for name in public_names(module.__name__)]
    assert len(names) > 100
    assert [name.path for name in names if id(name.value) not in shown] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    assert [name.path for name in public_names(module) if not name.doc] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_example(module: str) -> None:
    assert [name.path for name in public_names(module) if not has_example(name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_method_has_a_docstring(module: str) -> None:
    found = (method for name in public_names(module) for method in methods(name))
    assert [method.path for method in found if not method.doc] == []


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_are_valid_markup_with_formulas_that_can_be_shown(module: str) -> None:
    pytest.importorskip("docutils")
    places = (place for name in public_names(module) for place in written(name))
    assert [complaint for place in places for complaint in complaints(place)] == []


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_constants_are_true(module: str) -> None:
    """Pytest runs the examples of classes, functions and modules, not those below a constant."""
    for name in public_names(module):
        if name.is_constant:
            example = doctest.DocTestParser().get_doctest(name.doc, {}, name.path, None, None)
            assert doctest.DocTestRunner().run(example).failed == 0


def complaints(name: Public) -> list[str]:
    """What docutils finds wrong with a docstring, its formulas included."""
    from docutils import core, nodes
    from docutils.parsers.rst import roles

    for role in ROLES:
        roles.register_generic_role(role, nodes.literal)
    quiet = {"report_level": 5, "halt_level": 6, "math_output": "MathML", "warning_stream": False}
    page = core.publish_doctree(as_rest(name.doc), settings_overrides=quiet)
    found = [node.astext() for node in page.findall(nodes.system_message) if node["level"] > 1]
    titles = ["has a title" for _ in page.findall(nodes.title)]
    return [f"{name.path}: {text}" for text in (*found, *titles, *_unshown(page))]


def _unshown(page: object) -> list[str]:
    from docutils import nodes
    from docutils.utils.math.latex2mathml import tex2mathml

    found = []
    for formula in page.findall(lambda node: isinstance(node, nodes.math | nodes.math_block)):  # type: ignore[attr-defined]
        text = re.sub(r"\\(textstyle|[bB]ig)\b", "", formula.astext()).replace(
            r"\dots", r"\ldots"
        )  # MathJax knows these
        try:
            tex2mathml(text, as_block=isinstance(formula, nodes.math_block))
        except Exception as error:
            found.append(f"{formula.astext()!r}: {error}")
    return found


def test_the_rules_see_what_is_missing() -> None:
    @dataclass
    class Bare:
        size: int

        def method(self) -> None: ...

    module = ModuleType("bare")
    module.__dict__.update(Bare=Bare, __all__=["Bare"], __file__=__file__)
    sys.modules["bare"] = module
    try:
        [bare] = public_names("bare")
    finally:
        del sys.modules["bare"]
    assert bare.doc == "", "the docstring that a dataclass generates tells nothing"
    assert not has_example(bare)
    assert [method.doc for method in methods(bare)] == [""]


@pytest.mark.parametrize(
    "doc", ["An *open emphasis.", "A :nonsense:`role`.", ":math:`\\nonsense`", "Title\n=====\n\nText.", "``open"]
)
def test_the_rules_see_wrong_markup(doc: str) -> None:
    pytest.importorskip("docutils")
    assert complaints(Public("name", None, doc))
    assert not complaints(
        Public("name", None, "Text.\n\nArgs:\n    *args: passed on.\n    x: a *good* one\n        of 2.")
    )

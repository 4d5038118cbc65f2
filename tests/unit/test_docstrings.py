"""Every public name tells what it does and shows it: a docstring, an example that runs, a sentence for each method."""

from __future__ import annotations

import doctest
import re
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
from helpers.docstrings import Public, as_rest, has_example, methods, public_names, written

MODULES = [
    "lightning_fed",
    "lightning_fed.algorithms",
    "lightning_fed.callbacks",
    "lightning_fed.core",
    "lightning_fed.data",
    "lightning_fed.datamodules",
    "lightning_fed.engines",
    "lightning_fed.laboratory",
    "lightning_fed.models",
    "lightning_fed.partition",
    "lightning_fed.prox",
    "lightning_fed.sampling",
    "lightning_fed.store",
    "lightning_fed.theory",
    "lightning_fed.tracking",
    "lightning_fed.transforms",
]

#: Sphinx's own roles, of which docutils knows nothing
ROLES = ["attr", "class", "doc", "exc", "func", "meth", "mod", "ref"]


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

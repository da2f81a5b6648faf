"""Sphinx: `make docs` builds the pages with warnings as errors."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import hpccomm

sys.path.insert(0, str(Path(__file__).parent))
import cheat_sheet
from api_pages import written_out

project = "hpccomm"
author = "the hpccomm authors"
release = version = hpccomm.__version__

copyright = f"2026, {author}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
]
extensions += ["sphinx.ext.viewcode", "sphinx_copybutton", "faster"]  # docs/faster.py
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is copied has no prompts, and no output
copybutton_prompt_is_regexp = True
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"hpccomm {release}"
html_static_path = ["static"]
html_logo = html_favicon = "static/logo.svg"
html_css_files = ["hpccomm.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The docstrings are NumPy style; the signatures keep the names of the aliases instead of what these stand for.
default_role = "py:obj"  # of `name` in docstrings: a link, where there is such a name
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("Array", "Group", "ReduceOpLike", "Creator", "MPI.Op", "MPI.Intracomm")}
python_use_unqualified_type_names = True

# Links to other projects need their inventories from the network. `make docs` and CI build without one, and with
# warnings as errors; so there are such links only where there is a network: on Read the Docs, or if one says so.
if os.environ.get("READTHEDOCS") == "True" or os.environ.get("HPCCOMM_INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", None),
        "cupy": ("https://docs.cupy.dev/en/stable", None),
    }
    # `array` in a docstring is an argument, and not Python's module of that name
    intersphinx_disabled_reftypes = ["std:*", "py:obj"]


def shorten_signature(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Write an alias by its name, where autodoc writes TypeAliasForwardRef('Group')."""
    return tuple(part and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", part) for part in (signature, returns))


def is_plain_word(target: str) -> bool:
    """Whether a word in a docstring is English, as in the type "list of arrays", rather than the name of a class."""
    is_name = hasattr(builtins, target) or inspect.isclass(getattr(hpccomm, target, None))
    return target.isidentifier() and target.islower() and not is_name


def mend_fields(app: Any, doctree: nodes.document) -> None:
    """Unlink words that Sphinx takes for names, and say once what holds for several arguments."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = link.get("reftarget", "")
        if link.get("reftype") == "class" and "refspecific" in link and is_plain_word(target):
            link.replace_self(addnodes.literal_emphasis(text=target))
        elif link.get("reftype") == "obj" and target == "group":  # the argument, not hpccomm.group
            link.replace_self(nodes.literal(text=target))
    for field in doctree.findall(nodes.field):
        if field[0].astext() == "Variables":
            field[0].replace_self(nodes.field_name("", "Attributes"))
        for items in field.findall(nodes.bullet_list):
            merge_arguments(items)


def merge_arguments(items: nodes.bullet_list) -> None:
    """Join neighbours of a list of arguments that have the same type and the same description."""
    before = None
    for item in list(items.children):
        paragraph = item.children[0]
        name = paragraph.children[0]
        if before is not None and len(paragraph.children) > 1 and same_rest(paragraph, before):
            at = before.index(next(node for node in before.children if not is_name(node)))
            before.insert(at, [nodes.Text(", "), name.deepcopy()])
            items.remove(item)
        else:
            before = paragraph


def is_name(node: nodes.Node) -> bool:
    """Whether a part of a description is the name of an argument, or the comma between two."""
    return isinstance(node, addnodes.literal_strong) or node.astext() == ", "


def same_rest(one: nodes.Element, other: nodes.Element) -> bool:
    """Whether two descriptions differ in the names only."""
    texts = []
    for paragraph in (one, other):
        rest = [node for node in paragraph.children if not is_name(node)]
        texts.append("".join(node.astext() for node in rest) + str(len(paragraph.parent.children)))
    return texts[0] == texts[1] and len(texts[0]) > 4


def write_out(app: Any, page: str, source: list[str]) -> None:
    """Describe the functions in the tables of the API pages."""
    if page.startswith("api/"):
        source[0] = written_out(source[0])


def write_cheat_sheet(app: Any) -> None:
    """Write the PDF to the place where the page looks for it; fail if it needs a second page."""
    cheat_sheet.write(Path(__file__).parent / "_build" / "cheat-sheet.pdf")


def setup(app: Any) -> None:
    app.connect("builder-inited", write_cheat_sheet)
    app.connect("source-read", write_out)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("doctree-read", mend_fields)

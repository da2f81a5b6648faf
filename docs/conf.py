"""Sphinx: `make docs` builds the pages with warnings as errors."""

from __future__ import annotations

import re
from typing import Any

import hpccomm

project = "hpccomm"
author = "the hpccomm authors"
release = version = hpccomm.__version__

copyright = f"2026, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest"]
extensions += ["sphinx.ext.viewcode", "sphinx_copybutton"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is copied has no prompts, and no output
copybutton_prompt_is_regexp = True
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"hpccomm {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The docstrings are NumPy style; the signatures keep the names of the aliases instead of what these stand for.
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("Array", "Group", "ReduceOpLike", "Creator", "MPI.Op", "MPI.Intracomm")}
python_use_unqualified_type_names = True
# docs.python.org and others are not asked at build time: the documentation builds without a network.


def shorten_signature(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Write an alias by its name, where autodoc writes TypeAliasForwardRef('Group')."""
    return tuple(part and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", part) for part in (signature, returns))


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", shorten_signature)

"""What the package index is told, and what the pages tell to type."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from .launch import ROOT

pytestmark = pytest.mark.once


def test_the_readme_on_the_package_index_has_no_links_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    runpy.run_path(str(ROOT / "setup.py"))
    text = told["long_description"]
    assert "](docs/" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https?:)", text)
    assert "**Start:** quickstart; coming from torch.distributed" in text
    assert "$ mpiexec -n 4 python mean.py" in text


def test_what_the_pages_and_ci_make_is_in_the_makefile() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.*"), ROOT / ".ci" / "run"]
    asked = {
        target: page.name
        for page in pages
        if "_build" not in page.parts
        for target in re.findall(r"(?:`|\$ |run: |step )make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"))
    }
    assert {"test", "test-all", "lint", "demo"} <= asked.keys()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    there = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {target: page for target, page in asked.items() if target not in there} == {}
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.M)
    assert set(phony.split()) == there  # or a file of that name would stand for it

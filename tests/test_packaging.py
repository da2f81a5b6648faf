"""What the package index is told."""

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

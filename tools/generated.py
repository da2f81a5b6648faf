"""Shared by the scripts that generate files: write or compare a text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def formatted(text: str, suffix: str = ".py") -> str:
    """Return a module's text in ruff's format, with sorted imports and without unused ones."""
    for command in (["check", "--select=F401,F541,I", "--fix-only", "-q"], ["format", "-q"]):
        ruff = [
            sys.executable,
            "-m",
            "ruff",
            *command,
            f"--config={ROOT}/pyproject.toml",
            f"--stdin-filename=x{suffix}",
        ]
        text = subprocess.run([*ruff, "-"], input=text, capture_output=True, text=True, check=True).stdout
    return text


def write(file: Path, text: str) -> None:
    """Write the file; with ``--check`` on the command line exit with status 1 if its text differs."""
    if sys.argv[1:] != ["--check"]:
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        script = Path(sys.argv[0]).resolve().relative_to(ROOT)
        sys.exit(f"{file.relative_to(ROOT)} is out of date: run {script}")

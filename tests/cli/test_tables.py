"""Tables on stdout, in a terminal with and without rich."""

from __future__ import annotations

import io
import sys

import pytest

from hpccomm.cli.tables import print_table

pytestmark = pytest.mark.once

ROWS = [("10", "yes", "[bold]3[/bold]"), ("20", "no", "a")]
PLAIN = "step  whole  files\n10    yes    [bold]3[/bold]\n20    no     a\n"
RED = "\x1b[31m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, launcher: str | None = None, **environment: str) -> str:
    """Return what a terminal gets."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", terminal)
        context.setattr("hpccomm.cli.tables.launcher", lambda: launcher)
        print_table(ROWS, ("step", "whole", "files"))
    return terminal.getvalue()


def test_a_terminal_has_the_bad_rows_in_red(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    head, good, bad = printed(monkeypatch).splitlines()
    assert (RED in head, RED in good, RED in bad) == (False, False, True)
    assert "[bold]3[/bold]" in good


def test_no_color_means_no_red(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert printed(monkeypatch, NO_COLOR="1").splitlines()[1:]
    assert RED not in printed(monkeypatch, NO_COLOR="1")


def test_the_terminal_of_a_launcher_may_be_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, "mpirun (Open MPI)") == PLAIN


def test_without_rich_a_terminal_has_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert printed(monkeypatch) == PLAIN


def test_a_file_has_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, ("step", "whole", "files"))
    assert capsys.readouterr().out == PLAIN

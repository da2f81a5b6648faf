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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(sys.stdout, Terminal)
    return sys.stdout


def printed(terminal: Terminal) -> str:
    print_table(ROWS, ("step", "whole", "files"))
    return terminal.getvalue()


def test_a_terminal_has_the_bad_rows_in_red(terminal: Terminal) -> None:
    pytest.importorskip("rich")
    head, good, bad = printed(terminal).splitlines()
    assert (RED in head, RED in good, RED in bad) == (False, False, True)
    assert "[bold]3[/bold]" in good


def test_no_color_means_no_red(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("NO_COLOR", "1")
    assert RED not in printed(terminal)


def test_without_rich_a_terminal_has_plain_columns(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert printed(terminal) == PLAIN


def test_a_file_has_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, ("step", "whole", "files"))
    assert capsys.readouterr().out == PLAIN

"""What a process says on stderr: in one piece, and whatever has become of stderr."""

from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from hpccomm.process import stderr
from hpccomm.process.stderr import ERROR, INFO, WARNING, log, progress, tell, tell_verdict

from ..launch import clean_environment

pytestmark = pytest.mark.once


def packets(program: str) -> list[str]:
    """Return what a program without buffers writes on stderr, one text for each write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-u", "-c", program]
            subprocess.run(command, stderr=theirs, env=clean_environment(), check=True, timeout=60)
        return [packet.decode() for packet in iter(lambda: ours.recv(1 << 16), b"")]


def test_a_message_is_one_write_without_buffers_too() -> None:
    program = "from hpccomm.process.stderr import tell\ntell('one\\ntwo')\ntell('three')"
    assert packets(program) == ["one\ntwo\n", "three\n"]
    assert packets("import sys\nprint('one', file=sys.stderr)") == ["one", "\n"]  # what tell is there for


def test_a_daemon_thread_that_writes_lets_the_program_end() -> None:
    program = """
        import sys, threading, time
        from hpccomm.process.printed import _unread
        from hpccomm.process.stderr import tell
        threading.Thread(target=tell, args=("x" * 10**6,), daemon=True).start()
        while not _unread(sys.stderr.fileno()):  # a pipe that nobody reads holds less
            time.sleep(0.01)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environment()) as process:
        status = process.wait(60)
        assert process.stderr is not None
        assert set(process.stderr.read()) == {ord("x")}
    assert status == 0


def test_a_closed_stderr_keeps_nobody_from_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    tell("nobody reads this")
    monkeypatch.setattr(sys, "stderr", None)
    tell("nor this")


def test_on_a_stream_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    tell("aside", stream)
    assert (stream.getvalue(), capsys.readouterr().err) == ("aside\n", "")


def test_who_has_let_go_of_its_output_prints_nowhere_and_its_reader_sees_the_end() -> None:
    program = (
        "import os, sys\n"
        "from hpccomm.process.printed import let_go_of_output\n"
        "copy = os.dup(2)\n"
        "print('before', flush=True)\n"
        "let_go_of_output()\n"
        "print('after', flush=True)\n"
        "os.write(copy, b'after')\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=clean_environment(), **pipes) as process:  # type: ignore[call-overload]
        assert (process.stdout.read(), process.stderr.read()) == (b"before\n", b"")
        assert process.poll() is None  # it goes on until its stdin ends
        process.stdin.close()
        assert process.wait(60) == 0


# -- logging: pytest's own handler on the root logger is the program's ---------------------------------


def test_a_program_that_has_configured_logging_gets_records(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log("100 %s", WARNING)
    log("made", INFO)  # the root's level, WARNING, is not about hpccomm: the line is printed
    with caplog.at_level(logging.INFO, "hpccomm"):
        log("made 'dp'", INFO)
    with caplog.at_level(logging.ERROR, "hpccomm"):
        log("nobody wants this", WARNING)
    found = [(each.name, each.levelno, each.getMessage(), each.filename) for each in caplog.records]
    here = "test_stderr.py"
    assert found == [("hpccomm", WARNING, "100 %s", here), ("hpccomm", INFO, "made 'dp'", here)]
    assert capsys.readouterr().err == "hpccomm: made\n"


@pytest.mark.parametrize("imports", ["", "import logging"])
def test_without_handlers_lines_are_printed(imports: str) -> None:
    program = f"""
        import sys
        {imports}
        from hpccomm.process.stderr import INFO, log, tell_verdict
        log("made", INFO)
        log("warned")
        tell_verdict(["rank 1 is late", "the job ends"])
        assert ("logging" in sys.modules) == bool({imports!r})
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
    said = "hpccomm: made\nhpccomm: warned\nhpccomm: rank 1 is late\nhpccomm: the job ends\n"
    assert (done.returncode, done.stderr) == (0, said)


def test_a_verdict_is_a_record_and_on_stderr(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_verdict(["rank 1 is late", "the job ends"])
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [(ERROR, "rank 1 is late\nthe job ends")]
    assert capsys.readouterr().err == "hpccomm: rank 1 is late\nhpccomm: the job ends\n"


def test_a_handler_that_blocks_does_not_keep_a_verdict_from_ending_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on, has_come = threading.Event(), threading.Event()

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            goes_on.wait()
            has_come.set()

    handler = Blocked()
    monkeypatch.setattr(stderr, "PATIENCE", 0.01)
    logging.getLogger("hpccomm").addHandler(handler)
    try:
        tell_verdict(["rank 1 is late"])
        assert not has_come.is_set()
    finally:
        goes_on.set()
        logging.getLogger("hpccomm").removeHandler(handler)
    assert has_come.wait(60)
    assert capsys.readouterr().err == "hpccomm: rank 1 is late\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress({"a": 1, "b": 2}.items(), "files")) == [("a", 1), ("b", 2)]
    lines = "\x1b[Kfiles: 0 of 2\r\x1b[Kfiles: 1 of 2\r\x1b[K"
    assert stream.getvalue() == lines * is_terminal

"""What a process says on stderr: in one piece, and whatever has become of stderr."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import textwrap

import pytest

from hpccomm.process.stderr import tell

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

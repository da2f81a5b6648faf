"""The folder of a run, and what a process takes from others: files, questions, requests to end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpccomm.debug import mailbox
from hpccomm.debug.folder import Folder, own, put, read_text, runs
from hpccomm.debug.report import ASK, END, Reporter, read
from hpccomm.process import settings

pytestmark = [pytest.mark.serial, pytest.mark.once]


def test_a_file_is_replaced_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "reports" / "run-1")
    for text in ("first", "caf\udce9"):  # a name that is not UTF-8
        file = folder.put("x", text)
    assert (file, file.read_text()) == (tmp_path / "reports" / "run-1" / "x", "caf\\udce9")
    assert [each.name for each in file.parent.iterdir()] == ["x"]
    assert [each.stat().st_mode & 0o777 for each in (file, file.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("how", ["open to others", "a link", "a stranger's"])
def test_a_folder_that_others_can_write_into_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    wanted = tmp_path / "reports" / "run-1"
    wanted.parent.mkdir()
    if how == "a link":
        (tmp_path / "mine").mkdir()
        wanted.symlink_to(tmp_path / "mine")
    else:
        wanted.mkdir()
        wanted.chmod(0o777)
    if how == "a stranger's":
        wanted.chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: wanted.stat().st_uid + 1)
        with pytest.raises(PermissionError, match="is another user's, or others can write into it"):
            own(wanted)
        return
    file = Folder(wanted).put("x", "text")
    assert file == tmp_path / "tmp" / f"reports-{os.geteuid()}" / "run-1" / "x"
    assert list((tmp_path / "mine" if how == "a link" else wanted).iterdir()) == []


def test_links_are_neither_written_through_nor_read(tmp_path: Path) -> None:
    own_file = tmp_path / "bashrc"
    own_file.write_text("mine")
    folder = tmp_path / "run-1"
    folder.mkdir(mode=0o700)
    (folder / "rank0.json").symlink_to(own_file)
    (folder / ASK).symlink_to(own_file)
    reporter = Reporter(0, 2, folder)
    assert not reporter.is_asked()
    assert read(folder) == []
    reporter.write("a test")
    assert own_file.read_text() == "mine"
    assert read(folder)[0]["reason"] == "a test"


def test_orders_are_taken_from_this_user_and_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path, ASK, "-1 00")
    assert read_text(file, is_an_order=True) == "-1 00"
    os.mkfifo(tmp_path / "fifo")
    assert read_text(tmp_path / "fifo") == ""  # and does not wait
    status = os.fstat

    def of_a_stranger(opened: int) -> os.stat_result:
        fields = list(status(opened))
        fields[4] = 65534
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", of_a_stranger)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read_text(file, is_an_order=True) == ""
    assert read_text(file) == "-1 00"


@pytest.mark.parametrize(
    ("what", "obeyed"), [("now", True), ("an hour ago", False), ("in an hour", False), ("nonsense", False)]
)
def test_which_request_to_end_is_obeyed(tmp_path: Path, what: str, obeyed: bool) -> None:
    reporter = Reporter(0, 2, tmp_path / "run-1")
    when = {"now": time.time() + 0.5, "an hour ago": time.time() - 3600, "in an hour": time.time() + 3600}.get(what)
    reporter.folder.put(ASK, f"{END}{'nonsense' if when is None else when}")
    assert (reporter.time_of_end() is not None) == obeyed
    assert reporter.is_asked() == obeyed  # what is not obeyed is done with


def test_what_was_asked_before_is_for_others_and_nobody_beside_a_run_can_end_it(tmp_path: Path) -> None:
    Reporter(0, 2, tmp_path / "run-1").end_in(0.5)
    put(tmp_path, ASK, "-1 00")
    reporter, other = Reporter(0, 2, tmp_path / "run-1"), Reporter(0, 2, tmp_path / "run-2")
    assert not reporter.is_asked()
    assert not other.is_asked()
    put(tmp_path, ASK, f"{END}{time.time()}")
    assert not reporter.is_asked()
    put(tmp_path, ASK, "-1 01")
    assert (reporter.question(), other.question()) == ("-1 01", "-1 01")
    reporter.answer({})
    assert (reporter.is_asked(), other.is_asked()) == (False, True)
    assert read(tmp_path / "run-1")[0]["answers"] == "-1 01"


def test_a_rank_that_can_t_make_the_folder_is_seen_and_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "file").touch()
    here, there = (Reporter(rank, 2, tmp_path / "file" / "run-1") for rank in (0, 1))
    token = here.ask()
    there.answer({})
    assert [each["rank"] for each in here.collect(token, 0)] == [1]
    (tmp_path / "file").unlink()  # now the other one can
    token = here.ask()
    later = Reporter(1, 2, tmp_path / "file" / "run-1")
    later._answered.clear()
    later.answer({})
    assert later.folder.places[0] == tmp_path / "file" / "run-1"
    assert [each["rank"] for each in here.collect(token, 0)] == [1]
    assert (tmp_path / "tmp" / f"file-{os.geteuid()}").stat().st_mode & 0o777 == 0o700


def test_one_verdict_for_each_hang(tmp_path: Path) -> None:
    first, second = Reporter(0, 2, tmp_path / "run-1"), Reporter(1, 2, tmp_path / "run-1")
    assert first.claim(3.0)
    assert not second.claim(3.0)  # on what it has been in since before
    first.conclude("rank 1 is late")
    assert second.conclusion() == "rank 1 is late"
    claims = list(tmp_path.glob("run-1/.claim-*"))
    long_ago = time.time() - 60
    os.utime(claims[0], (long_ago, long_ago))
    assert second.claim(3.0)  # what has begun since is something else
    assert not second.has_concluded()
    assert not first.claim(3.0)
    second.conclude("rank 0 is late")
    assert first.conclusion() == "rank 0 is late"
    assert (tmp_path / "run-1" / "verdict.txt").read_text() == "rank 1 is late\n"


def test_ranks_that_ask_at_the_same_time_are_all_answered(tmp_path: Path) -> None:
    first, second, third = (Reporter(rank, 3, tmp_path / "run-1") for rank in range(3))
    earlier = first.ask()
    third.answer({})
    tokens = [first.ask(), second.ask()]  # in the one file: the second takes the place of the first
    assert third.question() == tokens[1]
    assert first.collect(tokens[0], 0) == []  # the answer to an earlier question is none
    for each in (first, second, third):
        each.answer({})
    for asks, token in zip((first, second), tokens):
        assert [(each["rank"], each["answers"]) for each in asks.collect(token, 0)] == [
            (rank, tokens[1]) for rank in range(3)
        ]
    assert earlier not in tokens


def test_a_verdict_without_words_is_one(tmp_path: Path) -> None:
    first, second = Reporter(0, 2, tmp_path / "run-1"), Reporter(1, 2, tmp_path / "run-1")
    assert first.claim()
    assert not second.claim(3.0)
    assert not second.has_concluded()
    first.conclude("")
    assert second.has_concluded()  # nobody waits for more
    assert second.conclusion() == ""


def test_the_clock_of_the_server_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter(0, 2, tmp_path / "run-1")
    assert reporter.claim(3.0)
    reporter.conclude("an old one")
    monkeypatch.setattr(reporter.folder, "now", lambda: time.time() + 3600)  # the claim was made by the same clock
    assert reporter.claim(3.0)


def test_forged_reports_are_left_out(tmp_path: Path) -> None:
    whole = json.loads(Reporter(0, 2, tmp_path).write("a test").read_text())
    for number, change in enumerate([{"size": 10**9}, {"rank": 7}, {"rank": "x"}, {"version": 0}, {"time": None}]):
        put(tmp_path, f"rank{number + 1}.json", json.dumps({**whole, **change}))
    put(tmp_path, "rank9.json", "[" * 100_000)
    assert [each["rank"] for each in read(tmp_path)] == [0]


@pytest.mark.parametrize("change", [{"groups": 5}, {"operations": [{"waits": True}]}, {"neighbours": []}])
def test_hpccomm_debug_of_a_report_that_makes_no_sense(tmp_path: Path, change: dict[str, object]) -> None:
    whole = json.loads(Reporter(0, 1, tmp_path).write("a test").read_text())
    put(tmp_path, "rank0.json", json.dumps({**whole, **change}))
    command = [sys.executable, "-m", "hpccomm", "debug", tmp_path]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (shown.returncode, "Traceback" in shown.stderr) in [(2, False), (0, False)]


def test_a_terminal_does_not_obey_a_report(tmp_path: Path) -> None:
    whole = json.loads(Reporter(0, 1, tmp_path).write("\x1b[31mred").read_text())
    put(tmp_path, "rank0.json", json.dumps({**whole, "threads": {"\x07bell": ["\x1b]0;owned"]}}))
    command = [sys.executable, "-m", "hpccomm", "debug", tmp_path, "--stacks"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (shown.returncode, "\\x1b[31mred" in shown.stdout, "\\x07bell" in shown.stdout) == (0, True, True)
    assert shown.stdout.replace("\n", "").isprintable()


def test_the_last_run_in_a_folder_is_shown_and_the_others_are_named(tmp_path: Path) -> None:
    for number, reason in enumerate(("first", "second")):
        file = Reporter(0, 1, tmp_path / f"run-{number}").write(reason)
        os.utime(file, (number, number))
    assert runs(tmp_path, "rank*.json") == [tmp_path / "run-0", tmp_path / "run-1"]
    command = [sys.executable, "-m", "hpccomm", "debug", tmp_path]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    assert f"the last of 2 runs in {tmp_path}; name another one to see it: {tmp_path / 'run-0'}" in shown
    assert "(second):" in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who acts for another user")
def test_root_who_asks_for_a_user_overwrites_nothing_of_root_s(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # that a stranger can reach
        base = Path(name)
        base.chmod(0o755)
        mine = base / "mine"
        mine.write_text("root's")
        theirs = base / "hpccomm-debug-5"
        theirs.mkdir()
        for link in (".ask.-1", "ask", ".ask"):
            (theirs / link).symlink_to(mine)
        os.chown(theirs, 65534, 65534)
        code = "from hpccomm.debug import asking; from hpccomm.cli.main import main; asking.PATIENCE = 0.2; main()"
        shown = subprocess.run(
            [sys.executable, "-c", code, "debug", theirs, "--job", "5"], capture_output=True, text=True, check=False
        )
        assert "no rank has answered" in shown.stderr
        assert mine.read_text() == "root's"
        assert (theirs / "ask").lstat().st_uid == 65534


def test_a_mailbox_says_where_reports_go(tmp_path: Path) -> None:
    assert mailbox.ask(os.getpid(), 5) is None  # there is none yet
    answers = (
        "import time, select; from pathlib import Path; from hpccomm.debug.mailbox import Mailbox\n"
        "box = Mailbox(); box.open()\n"
        "print('ready', flush=True)\n"
        "select.select([box], [], [])\n"
        f"for each in box.askers(time.monotonic()): box.answer(each, Path({str(tmp_path)!r}), 'token')\n"
        "input()\n"
    )
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", answers], text=True, **streams) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert mailbox.ask(process.pid, 60) == (tmp_path, "token")
        process.communicate("\n")


def _send_as_a_stranger(box: mailbox.Mailbox, sender: socket.socket, now: float, datagrams: int) -> None:
    for _ in range(datagrams):
        os.setresuid(65534, -1, -1)
        try:
            sender.sendto(mailbox.ASK, mailbox._address(os.getpid()))
        finally:
            os.setresuid(0, -1, -1)
        assert box.askers(now) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can be another user")
def test_a_mailbox_is_for_its_user_s_letters_only() -> None:
    with contextlib.closing(mailbox.Mailbox()) as box, mailbox._bound("") as sender:
        box.open()
        assert box.askers(100.0) == []
        assert not box.was_woken
        sender.sendto(mailbox.LOOK, mailbox._address(os.getpid()))
        assert box.askers(100.0) == []
        assert box.was_woken  # also where the letter has come when nobody polled any more
        box.was_woken = False
        for second, datagrams in ((101.0, 1), (102.0, mailbox.MANY - 1), (103.0, mailbox.MANY - 1)):
            _send_as_a_stranger(box, sender, second, datagrams)
            assert (box.is_open, box.was_woken) == (True, False)
            sender.sendto(mailbox.ASK, mailbox._address(os.getpid()))
            assert len(box.askers(second)) == 1
            box.was_woken = False
        _send_as_a_stranger(box, sender, 104.0, mailbox.MANY)
        assert (box.is_open, box.stranger) == (False, 65534)
        sender.sendto(mailbox.ASK, mailbox._address(os.getpid()))
        assert box.askers(104.0 + mailbox.CLOSED_FOR - 1) == []  # so nobody keeps it busy
        assert len(box.askers(104.0 + mailbox.CLOSED_FOR)) == 1
        assert box.is_open


def test_a_run_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "_run", "")
    job = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"}
    assert settings.folder_at_start(job) == f"{tmp_path}/hpccomm-debug-5/run-2-1"
    assert settings.folder_at_start({"HPCCOMM_DEBUG_DIR": "x", **job}) == f"{tmp_path}/x/run-2-1"
    assert settings.folder_at_start({"HPCCOMM_DEBUG_DIR": "/y/./x"}).startswith("/y/x/run-2")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert settings.debug_dir(job) == f"{tempfile.gettempdir()}/hpccomm-debug-5"

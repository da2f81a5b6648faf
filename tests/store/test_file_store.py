"""FileStore: killed writers, files of others, files that are none, damage, and who deletes the file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

import hpccomm as hc
from hpccomm.store import file_store, wire
from hpccomm.store.file_store import RECORD

from ..launch import clean_environment

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("path", "why"),
    [("missing/store", "No such file"), (".", "Is a directory"), ("file/store", "Not a directory")],
)
def test_an_impossible_path_fails_at_once(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hc.DistStoreError, match=f"can't be opened: {why}.*give a file in a folder that exists"):
        hc.FileStore(tmp_path / path)


def test_a_file_that_is_no_store_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    for text in ("Dear reader, this is no store.\n", "a short note"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(hc.DistStoreError, match="is a file, but not a store"):
            hc.FileStore(path)
        assert path.read_text() == text


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "another's")
    with pytest.raises(hc.DistStoreError, match="can't be opened: It is a symbolic link"):
        hc.FileStore(tmp_path / "link")
    assert not (tmp_path / "another's").exists()


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o604])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "store").touch()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(hc.DistStoreError, match=rf"only: it has uid \d+ and mode {mode:o}; .*chmod 600"):
        hc.FileStore(tmp_path / "store")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").touch(0o600)
    os.chown(tmp_path / "store", 65534, -1)
    with pytest.raises(hc.DistStoreError, match="it has uid 65534 and mode 600"):
        hc.FileStore(tmp_path / "store")


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store", 0o600)
    with pytest.raises(hc.DistStoreError, match="is not a file"):
        hc.FileStore(tmp_path / "store")


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").touch(0o600)
    with hc.FileStore(tmp_path / "store") as store:
        store.set("key", b"value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_half_a_record_of_a_killed_writer_is_overwritten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "store"
    with hc.FileStore(path) as store:
        store.set("kept", b"1")
        whole = path.stat().st_size
        store.set("lost", b"2" * 50)
    os.truncate(path, path.stat().st_size - cut)
    assert path.stat().st_size > whole
    with hc.FileStore(path) as reader, hc.FileStore(path) as writer:
        assert reader.list_keys() == ["kept"]
        writer.set("new", b"3")
        assert reader.list_keys() == ["kept", "new"]
    with hc.FileStore(path) as later:
        assert later.multi_get(["kept", "new"]) == [b"1", b"3"]


def test_zeros_end_the_log_and_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with hc.FileStore(path) as store:
        store.set("kept", b"1")
        for zeros in (5, 64):  # what the crash of a node leaves
            os.truncate(path, path.stat().st_size + zeros)
            assert store.get("kept") == b"1"
            with hc.FileStore(path) as later:
                later.set(str(zeros), b"2")
            assert store.list_keys().count(str(zeros)) == 1


def test_any_flipped_bit_is_an_error_and_nothing_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with hc.FileStore(path) as store:
        for number in range(3):
            store.set(f"key {number}", b"value")
        whole = path.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(hc.DistStoreError, match=r"is damaged at byte \d+|not a store"):
                hc.FileStore(path)
            assert path.read_bytes() == damaged
        path.write_bytes(whole)
        assert store.num_keys() == 3


def test_a_record_that_is_no_request_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for data in (b"", b"short", b"x" * 100, wire.HEADER.pack(wire.VERSION, 1, 0, 0, 1, 1, 8)):
        path.unlink(missing_ok=True)
        with hc.FileStore(path) as store:
            record = RECORD.pack(len(data), zlib.crc32(struct.pack("<I", len(data))), zlib.crc32(data)) + data
            with path.open("ab") as file:
                file.write(record)
            with pytest.raises(hc.DistStoreError, match="is damaged at byte 16"):
                store.check(["key"])


def test_a_file_that_has_become_shorter_is_damaged(tmp_path: Path) -> None:
    with hc.FileStore(tmp_path / "store") as store:
        store.set("key", b"value")
        os.truncate(tmp_path / "store", 20)
        with pytest.raises(hc.DistStoreError, match="is damaged"):
            store.get("key")


HOLDER = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_wait_ends_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    store = hc.FileStore(tmp_path / "store", timeout=60)
    store.set("key", b"value")
    command = [sys.executable, "-c", HOLDER, store.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environment()) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        store.set_timeout(0.5)
        for call in (lambda: store.get("key"), lambda: store.set("key", b"new"), store.num_keys, store.clone):
            with pytest.raises(hc.DistTimeoutError, match=r"another process has held the lock of .*fuser -v"):
                call()
        assert holder.poll() is None
        holder.stdin.close()
        store.set_timeout(60)
        assert store.get("key") == b"value"
    store.close()


def test_a_file_that_is_gone_or_replaced_is_an_error_and_close_is_not(tmp_path: Path) -> None:
    path = tmp_path / "store"
    gone, replaced = hc.FileStore(path, world_size=1), hc.FileStore(path)
    path.unlink()
    with pytest.raises(hc.DistStoreError, match="has been deleted or replaced"):
        gone.set("key", b"value")
    with hc.FileStore(path) as new:
        for call in (lambda: replaced.set("key", b"old"), lambda: replaced.check(["key"])):
            with pytest.raises(hc.DistStoreError, match="has been deleted or replaced"):
                call()
        gone.close()
        assert gone.is_closed
        assert new.list_keys() == []


def test_who_opens_a_file_that_its_last_user_deletes_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    last = hc.FileStore(path, world_size=1)
    real = hc.FileStore._open

    def slow(store: hc.FileStore, create: int) -> os.stat_result:
        found = real(store, create)
        last.close()  # between open and lock
        return found

    monkeypatch.setattr(hc.FileStore, "_open", slow)
    with hc.FileStore(path) as store:
        store.set("key", b"value")
        with hc.FileStore(path) as other:
            assert other.get("key") == b"value"


def test_a_relative_path_is_the_same_file_after_a_change_of_folder_and_a_fork(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    program = FORKS.replace("child = os.fork()", 'os.chdir("elsewhere"); child = os.fork()')
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "store"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=clean_environment(),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("b'1000'\n", "")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_store_that_replaces_another_has_no_keys_and_deletes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with hc.FileStore(path) as old:
        old.set("key", b"old")
        with hc.FileStore.replacing(str(path)) as new:
            assert new.list_keys() == []
            with pytest.raises(hc.DistStoreError, match="has been deleted or replaced"):
                old.get("key")
        assert not path.exists()


WRITER = """
import sys
import hpccomm as hc
store = hc.FileStore(sys.argv[1])
print("begun", flush=True)
i = 0
while True:
    store.set(f"{sys.argv[2]}/{i}", b"x" * 20_000)
    store.set(f"{sys.argv[2]}/count", str(i))
    i += 1
"""


def test_writers_that_are_killed_lose_nothing_that_was_complete(tmp_path: Path) -> None:
    path = tmp_path / "store"
    command = [sys.executable, "-c", WRITER, str(path)]
    for turn in range(5):
        writers = [
            subprocess.Popen([*command, f"{turn}-{i}"], stdout=subprocess.PIPE, env=clean_environment())
            for i in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
        time.sleep(0.05 + 0.03 * turn)  # whatever they are doing then
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        with hc.FileStore(path, timeout=5) as store:
            store.set(f"after {turn}", b"alive")
            assert store.list_keys().count(f"after {turn}") == 1
            for i in range(2):
                if store.check([f"{turn}-{i}/count"]):
                    last = int(store.get(f"{turn}-{i}/count"))
                    assert all(store.get(f"{turn}-{i}/{n}") == b"x" * 20_000 for n in range(last + 1))


def _add(path: str, times: int) -> None:
    with hc.FileStore(path) as store:
        for _ in range(times):
            store.add("n", 1)


def test_processes_count_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(str(tmp_path / "store"), 200)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    with hc.FileStore(tmp_path / "store") as store:
        assert store.get("n") == b"600"


FORKS = """
import os, sys
import hpccomm as hc
store = hc.FileStore(sys.argv[1])
child = os.fork()
for _ in range(500):
    store.add("n", 1)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(store.get("n"))
"""


def test_a_forked_child_has_a_lock_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=clean_environment())
    assert (done.stdout, done.stderr) == ("b'1000'\n", "")


def test_the_last_of_world_size_deletes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = hc.FileStore(path, 2), hc.FileStore(path, 2)
    clone = first.clone()
    clone.set("key", b"value")
    clone.close()
    first.close()
    assert path.exists()
    assert second.list_keys() == ["key"]
    second.close()
    assert not path.exists()


def test_without_world_size_the_file_stays(tmp_path: Path) -> None:
    hc.FileStore(tmp_path / "store").close()
    assert (tmp_path / "store").exists()


def test_where_nothing_can_be_written_the_store_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hc.FileStore(tmp_path / "store") as store:
        store.set("key", b"old")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(file_store, "_write", full)
            with pytest.raises(hc.DistStoreError, match="can't be written: No space left on device"):
                store.set("key", b"new")
        assert store.get("key") == b"old"
        store.set("key", b"newer")
        assert store.clone().get("key") == b"newer"


def test_a_dropped_store_leaves_no_file_open(tmp_path: Path) -> None:
    def is_open() -> bool:
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        return any(os.readlink(link) == str(tmp_path / "store") for link in links if os.path.islink(link))

    store = hc.FileStore(tmp_path / "store")
    assert is_open()
    del store
    assert not is_open()


def test_a_clone_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = hc.FileStore(path)
    path.unlink()
    with pytest.raises(hc.DistStoreError, match="has been deleted or replaced"):
        store.clone()
    store.close()
    with pytest.raises(hc.DistStoreError, match="has been closed"):
        store.clone()
    assert not path.exists()

"""FileStore: killed writers, files that are none, and who deletes the file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpccomm as hc
from hpccomm.store import file_store

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
    path.write_text("Dear reader, this is no store.\n")
    with pytest.raises(hc.DistStoreError, match="is a file, but not a store"):
        hc.FileStore(path)
    assert path.read_text() == "Dear reader, this is no store.\n"


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
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


def test_a_record_with_a_wrong_checksum_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with hc.FileStore(path) as store:
        store.set("kept", b"1")
        store.set("damaged", b"value")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with hc.FileStore(path) as store:
        assert store.list_keys() == ["kept"]


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

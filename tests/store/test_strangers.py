"""Who has no key, or belongs to another user: he gets no file, no line of stderr, no word and no place in between."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import hpccomm as hc
from hpccomm.store import connection, wire
from hpccomm.store import master as masters
from hpccomm.store.handshake import HELLO, MAGIC, NONCE, PROOF, TAG
from hpccomm.store.master import Master, listen_on_this_node
from hpccomm.store.server import STRANGERS, Limits, Server
from hpccomm.store.table import Op
from hpccomm.store.wire import HEADER

from .master import KEY
from .test_server import PATIENCE, Introduced, Process, client, connected, exactly, rest, serving

pytestmark = pytest.mark.once


# -- those at the port ------------------------------------------------------------------------------------------


def test_silent_and_noisy_strangers_take_no_files_no_lines_and_nobodys_place() -> None:
    with Process(files=256) as server, client(server.port) as first, contextlib.ExitStack() as stack:
        first.set("a", "1")
        for number in range(400):
            raw = stack.enter_context(connected(server.port))
            if number % 2:
                with contextlib.suppress(ConnectionError):  # it has dropped this one already
                    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
            if number % 40 == 39:
                assert server.opens(64) == 64
                with client(server.port) as honest:
                    assert honest.get("a") == b"1"
                assert first.get("a") == b"1"
        assert len(server.ended().splitlines()) <= 10


def test_clients_leave_files_to_a_program_that_has_many() -> None:
    with Process(files=256) as server, contextlib.ExitStack() as stack:
        assert server.opens(-150) == 150

        def connect_all() -> None:
            for _ in range(256 - 150 - 40):
                stack.enter_context(client(server.port))

        with pytest.raises(hc.DistNetworkError, match=r"it has \d+ clients, as many as its process may have open"):
            connect_all()
        assert server.opens(40) == 40


def test_the_oldest_stranger_makes_room_for_the_next() -> None:
    with serving(handshake=10 * PATIENCE) as port, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(port)) for _ in range(STRANGERS + 1)]
        assert rest(strangers[0]) == b""
        with client(port) as honest:
            honest.set("a", "1")
            assert honest.get("a") == b"1"


def test_where_all_files_are_in_use_the_server_waits_for_one() -> None:
    with Process(files=128) as server, client(server.port) as first, ThreadPoolExecutor() as pool:
        first.set("a", "1")
        server.opens(0)
        assert server.opens(1) == 0  # nothing is left
        assert first.get("a") == b"1"
        coming = pool.submit(lambda: client(server.port).get("a"))
        server.opens(0)
        assert coming.result(PATIENCE) == b"1"
        assert len(server.ended().splitlines()) <= 10


def test_a_problem_of_the_server_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(KEY, Limits())
    with caplog.at_level(logging.WARNING, "hpccomm"):
        for number in range(100):
            server._complain(OSError(errno.EMFILE, f"too many open files, {number}"))
    assert [record.getMessage().count("too many open files, 0") for record in caplog.records] == [1]


# -- on one node ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_this_node() -> Iterator[Master]:
    master = Master(listen_on_this_node(), KEY)
    yield master
    master.close()


def test_on_one_node_no_port_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCCOMM_STORE_HOST", raising=False)
    master, (host, port, key) = masters.serve(None, None)
    assert host.startswith("@hpccomm-")
    assert port == 0
    with hc.TCPStore.at(host, port, key, PATIENCE) as store:
        store.set("a", "1")
        assert store.clone().get("a") == b"1"
    master.close()
    monkeypatch.setenv("HPCCOMM_STORE_HOST", "127.0.0.1")
    master, (host, port, key) = masters.serve(None, None)
    master.close()
    assert host == "127.0.0.1"
    assert port > 0


def test_a_server_does_not_hear_another_user(on_this_node: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # the server's; the client is who it was
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE)
        raw.connect("\0" + on_this_node.host[1:])
        with contextlib.suppress(ConnectionError):
            raw.sendall(MAGIC + bytes(NONCE))
        assert rest(raw) == b""


def test_a_client_does_not_believe_another_users_server(on_this_node: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(hc.DistNetworkError, match="can't be reached: it belongs to another user"):
        hc.TCPStore.at(on_this_node.host, 0, KEY, PATIENCE).get("a")


OTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
raw = socket.socket(socket.AF_UNIX)
raw.settimeout(60)
raw.connect("\\0" + sys.argv[1][1:])
try:
    raw.sendall(bytes(100))
    print(raw.recv(100))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_node_is_not_heard(on_this_node: Master) -> None:
    with hc.TCPStore.at(on_this_node.host, 0, KEY, PATIENCE) as store:
        store.set("a", "1")
        done = subprocess.run(
            [sys.executable, "-c", OTHER_USER, on_this_node.host],
            cwd="/", capture_output=True, text=True, timeout=PATIENCE, check=False,
            env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("b''\n", "")
        assert store.get("a") == b"1"


def test_another_job_of_the_same_user_has_another_key(on_this_node: Master) -> None:
    with pytest.raises(hc.DistNetworkError, match=r"refused this process: .* another key \(auth_key\)"):
        hc.TCPStore.at(on_this_node.host, 0, b"the other job's key", PATIENCE).get("a")


# -- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a str of 16 bytes or more", 5, [1] * 16])
def test_a_key_is_bytes(key: Any) -> None:
    with pytest.raises(TypeError, match=r"auth_key is a (str|int|list); expected bytes: secrets.token_bytes\(32\)"):
        hc.TCPStore("127.0.0.1", 0, is_master=True, auth_key=key)


@pytest.mark.parametrize("length", [0, 1, 15])
def test_a_short_key_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"auth_key has {length} bytes; expected 16 or more.*None for no key"):
        hc.TCPStore("127.0.0.1", 1, auth_key=bytes(length))


@pytest.mark.parametrize("other", [KEY + b"\0", KEY + bytes(64), None])
def test_keys_that_differ_by_zeros_are_different(other: bytes | None) -> None:
    with serving() as port, pytest.raises(hc.DistNetworkError, match="another key"):
        hc.TCPStore("127.0.0.1", port, auth_key=other, timeout=PATIENCE)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_a_key_a_master_is_for_loopback_only(host: str) -> None:
    with pytest.raises(ValueError, match=r"without auth_key everybody who reaches .* give auth_key=secrets"):
        hc.TCPStore(host, 0, is_master=True)
    with hc.TCPStore("localhost", 0, is_master=True) as store:
        store.set("a", "1")
    with hc.TCPStore("0.0.0.0", 0, is_master=True, auth_key=KEY) as store:
        store.set("a", "1")


# -- in between -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def between(port: int, change: Callable[[bytes], bytes] = bytes) -> Iterator[tuple[int, list[tuple[Any, Any]]]]:
    """Listen for clients and pass on what they and the master at `port` say, with what `change` makes of an answer."""
    pairs = []

    def pass_on(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                to_client, _ = listener.accept()
                to_master = connected(port)
                to_client.settimeout(PATIENCE)
                pairs.append((to_client, to_master))
                for each in ((to_client, to_master, bytes), (to_master, to_client, change)):
                    threading.Thread(target=pass_on, args=each, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], pairs
        listener.shutdown(socket.SHUT_RDWR)
    for pair in pairs:
        for each in pair:
            each.close()


def test_a_relay_of_the_proofs_can_not_ask() -> None:
    with serving() as port, client(port) as honest:
        honest.set("token", "SECRET")
        with Introduced(port) as stolen:
            stolen.raw.sendall(wire.packed(Op.SET, ["token"], [b"FORGED"]) + bytes(TAG))
            assert b"somebody is in between" in rest(stolen.raw)
        assert honest.get("token") == b"SECRET"


def test_a_message_counts_once() -> None:
    with serving() as port, client(port) as honest:
        with Introduced(port) as raw:
            message = raw.session.signed(wire.packed(Op.ADD, ["n"], number=1))
            raw.raw.sendall(message)
            raw.answer()
            raw.raw.sendall(message)
            assert b"somebody is in between" in rest(raw.raw)
        assert honest.get("n") == b"1"


def test_a_changed_answer_is_not_believed() -> None:
    def change(data: bytes) -> bytes:
        return data.replace(b"the truth", b"fine lies")

    with serving() as port, client(port) as honest, between(port, change) as (elsewhere, _), client(elsewhere) as store:
        honest.set("a", "the truth")
        honest.set("b", "another")
        with pytest.raises(hc.DistNetworkError, match="not the store's; somebody is in between"):
            store.get("a")
        assert store.get("b") == b"another"


# -- networks that hiccup ---------------------------------------------------------------------------------------


def test_an_idle_connection_that_was_cut_is_made_again() -> None:
    with serving() as port, between(port) as (elsewhere, pairs), client(elsewhere) as store:
        for number, call in enumerate((lambda: store.set("a", "1"), lambda: store.get("a"), lambda: store.add("n", 1))):
            call()
            assert len(pairs) == number + 1
            for raw in pairs[-1]:
                raw.shutdown(socket.SHUT_RDWR)
            while store._connections._idle[0].is_open():
                pass


def test_a_read_is_repeated_where_the_cut_was_not_seen_and_a_write_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.Connection, "is_open", lambda _: True)
    with serving() as port, between(port) as (elsewhere, pairs), client(elsewhere) as store:
        store.set("a", "1")
        for raw in pairs[-1]:
            raw.shutdown(socket.SHUT_RDWR)
        assert store.get("a") == b"1"
        for raw in pairs[-1]:
            raw.shutdown(socket.SHUT_RDWR)
        with pytest.raises(hc.DistNetworkError, match="is gone"):
            store.add("n", 1)


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
    ids=["name", "route", "reset"],
)
def test_what_passes_is_tried_again(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_connection
    with serving() as port, client(port) as store:
        store.set("a", "1")
        failures = [error] * 3

        def create_connection(*arguments: Any) -> socket.socket:
            if failures:
                raise failures.pop()
            return real(*arguments)

        monkeypatch.setattr(connection.socket, "create_connection", create_connection)
        assert hc.TCPStore.at("127.0.0.1", port, KEY, PATIENCE).get("a") == b"1"
        assert not failures


def test_a_name_that_does_not_exist_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")]

    def create_connection(*_: Any) -> socket.socket:
        raise failures.pop()

    monkeypatch.setattr(connection.socket, "create_connection", create_connection)
    with pytest.raises(hc.DistNetworkError, match="Name or service not known"):
        hc.TCPStore("no-such-host.invalid", 29500, auth_key=KEY)


def test_a_master_that_answers_a_byte_now_and_then_does_not_hold_a_client() -> None:
    ended = threading.Event()

    def serve() -> None:
        raw, _ = listener.accept()
        with raw, contextlib.suppress(ConnectionError):
            exactly(raw, HELLO)
            for _ in range(1 + NONCE + 1 + PROOF):
                raw.sendall(b"\0")
                if ended.wait(0.3):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        served = pool.submit(serve)
        with pytest.raises(hc.DistNetworkError, match="does not answer"):
            hc.TCPStore("127.0.0.1", listener.getsockname()[1], auth_key=KEY, timeout=1)
        ended.set()
        served.result(PATIENCE)


def test_a_header_alone_does_not_hold_a_client_either() -> None:
    with serving() as port:
        data = HEADER.pack(wire.VERSION, 0, 0, 0.0, 0, 0, 1 << 20)

        def change(answer: bytes) -> bytes:
            return data if answer.startswith(bytes([wire.VERSION])) else answer

        with between(port, change) as (elsewhere, _):
            store = hc.TCPStore.at("127.0.0.1", elsewhere, KEY, PATIENCE)
            with pytest.raises(hc.DistNetworkError, match="has not answered within 1 s"):
                store._connections.ask(wire.packed(Op.CHECK, ["a"]), 1.0, may_repeat=True)

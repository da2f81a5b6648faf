"""The server of a TCPStore: strangers, liars, the slow, the dead, and the many."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import hpccomm as hc
from hpccomm.store import handshake, server, wire
from hpccomm.store.handshake import HELLO, MAGIC, NONCE, PROOF, Verdict
from hpccomm.store.master import Master, listen
from hpccomm.store.server import OTHER_FILES, Limits
from hpccomm.store.table import LARGEST_KEY, Op
from hpccomm.store.wire import HEADER, Status

from ..launch import ROOT, clean_environment, until
from .master import KEY

pytestmark = pytest.mark.once

PATIENCE = 60.0  # seconds: what takes longer hangs
MIB = 1 << 20
SECRET = b"the honest one's secret"


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[int]:
    """Serve in this process; the port."""
    master = Master(listen("127.0.0.1", 0), KEY, Limits(**limits))
    try:
        yield master.port
    finally:
        master.close()


class Process:
    """A master in a process of its own."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.store.master", json.dumps(options)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes
            self.process.kill()

    def opens(self, files: int) -> int:
        """Let it open so many files at once; return how many it could."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{files}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline() or 0)

    def ended(self) -> str:
        """Return what it has written to stderr, when it has ended."""
        return self.process.communicate(timeout=PATIENCE)[1]

    def largest_memory(self) -> int:
        """Return the most memory that the process has had, in bytes."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def client(port: int, timeout: float = PATIENCE, key: bytes = KEY) -> hc.TCPStore:
    return hc.TCPStore("127.0.0.1", port, auth_key=key, timeout=timeout)


def connected(port: int, source: str = "127.0.0.1", buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    raw.settimeout(PATIENCE)
    if buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    raw.bind((source, 0))
    raw.connect(("127.0.0.1", port))
    return raw


class Introduced:
    """A connection whose server believes that it has the key; what it sends as frames has their tags."""

    def __init__(self, port: int, source: str = "127.0.0.1", buffer: int | None = None) -> None:
        self.raw = connected(port, source, buffer)
        nonce = os.urandom(NONCE)
        self.raw.sendall(MAGIC + nonce)
        server = exactly(self.raw, 1 + NONCE)[1:]
        self.raw.sendall(handshake.proof(KEY, "client", nonce, server))
        assert exactly(self.raw, 1 + PROOF)[0] == Verdict.WELCOME
        self.session = handshake.Session(self.raw, KEY, True, nonce, server)

    def __enter__(self) -> Introduced:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def send(self, *frames: bytes) -> None:
        self.raw.sendall(b"".join(map(self.session.signed, frames)))

    def answer(self) -> tuple[int, list[bytes]]:
        head = exactly(self.raw, HEADER.size)
        header = wire.header(head)
        body = exactly(self.raw, header.length)
        assert self.session.is_next(head, body, exactly(self.raw, handshake.TAG))
        return header.code, wire.fields(header, body)

    def refusal(self, frame: bytes) -> str:
        """Return what the server says of a frame, before it closes the connection."""
        self.send(frame)
        code, (reason,) = self.answer()
        assert code == Status.MALFORMED
        assert rest(self.raw) == b""
        return reason.decode()


def exactly(raw: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = raw.recv(nbytes - len(data))
        assert part, "the server has closed the connection"
        data += part
    return bytes(data)


def rest(raw: socket.socket) -> bytes:
    """Return what comes until the server closes the connection; it has to."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := raw.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


# -- strangers --------------------------------------------------------------------------------------------------


def test_a_client_with_another_key_is_refused_and_changes_nothing() -> None:
    with serving() as port, client(port) as honest:
        honest.set("a", SECRET)
        with pytest.raises(hc.DistNetworkError, match=r"refused this process: .* another key \(auth_key\)"):
            client(port, key=b"a guess of 16 bytes, or more")
        with connected(port) as raw:
            raw.sendall(MAGIC + bytes(NONCE) + bytes(PROOF) + wire.packed(Op.SET, ["a"], [b"mine"]))
            assert len(rest(raw)) == 1 + NONCE + 1
        assert honest.get("a") == SECRET
        assert honest.num_keys() == 1


def test_a_client_without_the_key_learns_nothing() -> None:
    with serving() as port, client(port) as honest:
        honest.set("a", SECRET)
        nonces = set()
        for first in (MAGIC + bytes(NONCE), wire.packed(Op.GET, ["a"]) * 4):
            for then in (bytes(PROOF), wire.packed(Op.GET, ["a"]) * 4, wire.packed(Op.LIST, [""]) * 4):
                with connected(port) as raw:
                    raw.sendall(first + then)
                    heard = rest(raw)
                if heard[0] == Verdict.WELCOME:
                    nonces.add(heard[1 : 1 + NONCE])
                    assert heard[1 + NONCE :] == bytes([Verdict.WRONG_KEY])
                else:
                    assert heard == bytes([Verdict.OTHER_PROTOCOL])
        assert len(nonces) == 3


def test_a_proof_holds_once() -> None:
    with serving() as port, connected(port) as raw, connected(port) as thief:
        nonce = os.urandom(NONCE)
        raw.sendall(MAGIC + nonce)
        proof = handshake.proof(KEY, "client", nonce, exactly(raw, 1 + NONCE)[1:])
        raw.sendall(proof)
        reflected = exactly(raw, 1 + PROOF)[1:]
        for heard in (proof, reflected):
            with connected(port) as thief:
                thief.sendall(MAGIC + nonce + heard)
                assert rest(thief)[-1] == Verdict.WRONG_KEY


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (lambda heard: bytes(1 + NONCE + 1 + PROOF), "has another key"),
        (lambda heard: bytes(1 + NONCE + 1) + heard[-PROOF:], "has another key"),  # the client's own proof
        (lambda heard: bytes([Verdict.OTHER_PROTOCOL]), "another version of the protocol"),
        (lambda heard: b"HTTP/1.1 400 Bad Request\r\n\r\n", "no store of hpccomm"),
        (lambda heard: b"", "can't be reached: .*refused"),  # tried again: a busy master drops who is late
    ],
)
def test_a_server_that_does_not_show_the_key_is_not_believed(says: Callable[[bytes], bytes], message: str) -> None:
    def serve() -> None:
        raw, _ = listener.accept()
        listener.close()
        with raw:
            reply = says(bytes(PROOF))
            heard = exactly(raw, HELLO)
            raw.sendall(reply[: 1 + NONCE])
            if len(reply) > 1 + NONCE:
                heard += exactly(raw, PROOF)
                raw.sendall(says(heard)[1 + NONCE :])

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        served = pool.submit(serve)
        store = hc.TCPStore.at("127.0.0.1", port, KEY, PATIENCE)
        with pytest.raises(hc.DistNetworkError, match=message):
            store.get("a")
        served.result(PATIENCE)


def test_another_version_of_the_protocol_is_named() -> None:
    with serving() as port:
        with connected(port) as raw:
            raw.sendall(MAGIC[:-1] + bytes([wire.VERSION + 1]) + bytes(NONCE))
            assert rest(raw) == bytes([Verdict.OTHER_PROTOCOL])
        with Introduced(port) as raw:
            frame = bytearray(wire.packed(Op.GET, ["a"]))
            frame[0] += 1
            assert raw.refusal(bytes(frame)) == f"version {frame[0]} of the protocol; this is version {wire.VERSION}"


# -- frames that are none ---------------------------------------------------------------------------------------


def head(
    op: int = Op.SET, number: int = 0, seconds: float = 0.0, keys: int = 1, values: int = 1, length: int = 10
) -> bytes:
    return HEADER.pack(wire.VERSION, op, number, seconds, keys, values, length)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (head(99) + struct.pack("<II", 1, 1) + b"ab", "operation 99"),
        (head(length=0xFFFFFFFF), "1 keys and 1 values in 4294967295 bytes"),
        (head(length=7), "1 keys and 1 values in 7 bytes"),
        (head(keys=0xFFFFFFFF, length=wire.LARGEST_MESSAGE), "4294967295 keys"),
        (head() + struct.pack("<II", 1, 2) + b"ab", "fields of 3 bytes in a body of 10"),
        (head() + struct.pack("<II", 0xFFFFFFFF, 1) + b"ab", "fields of 4294967296 bytes"),
        (head() + struct.pack("<II", 1, 1) + b"\xffb", "not UTF-8"),
        (wire.packed(Op.GET, ["k" * (LARGEST_KEY + 1)]), "a key of more than 16384 bytes"),
        (wire.packed(Op.ADD, ["a"], [b"1"]), "ADD with 1 keys and 1 values"),
        (wire.packed(Op.SET, ["a", "b"], [b"1"]), "SET with 2 keys and 1 values"),
        (wire.packed(Op.GET, ["a"], seconds=float("nan")), "a wait of nan seconds"),
        (wire.packed(Op.GET, ["a"], seconds=-1), "a wait of -1.0 seconds"),
    ],
    ids=itertools.count(),
)
def test_a_malformed_frame_is_named_and_ends_the_connection(frame: bytes, reason: str) -> None:
    with serving() as port, Introduced(port) as raw:
        assert reason in raw.refusal(frame)


def test_a_frame_may_come_byte_by_byte_and_several_at_once() -> None:
    frames = wire.packed(Op.SET, ["a"], [b"1"]), wire.packed(Op.ADD, ["a"], number=2), wire.packed(Op.GET, ["a"])
    with serving() as port, Introduced(port) as raw:
        for byte in b"".join(map(raw.session.signed, frames)):
            raw.raw.sendall(bytes([byte]))
        raw.send(*frames)
        for _ in range(2):
            assert [raw.answer() for _ in frames] == [(Status.OK, []), (Status.OK, []), (Status.OK, [b"3"])]


class Liar:
    """What sends the server all that a client should not, by `random`."""

    FRAMES = (
        wire.packed(Op.SET, ["fuzz"], [b"value"]),
        wire.packed(Op.GET, ["fuzz", "nobody's"], seconds=1e9),
        wire.packed(Op.ADD, ["fuzz number"], number=1),
        wire.packed(Op.COMPARE_SET, ["fuzz"], [b"", b"other"]),
        wire.packed(Op.PUSH, ["fuzz queue"], [b"x" * 50]),
        wire.packed(Op.POP, ["fuzz queue"], number=1, seconds=1e9),
        wire.packed(Op.LIST, ["fuzz"]),
    )

    def __init__(self, port: int, number: int) -> None:
        self.port = port
        self.source = f"127.0.0.{number + 2}"  # ports of its own
        self.random = random.Random(number)

    def lie(self) -> None:
        """Make one connection and send one malformed frame."""
        knows_the_key = self.random.random() < 0.6
        frame = self.random.choice(self.AFTER if knows_the_key else self.BEFORE)(self)
        if knows_the_key:
            honest = Introduced(self.port, self.source)
            raw = honest.raw
            if self.random.random() < 0.7:  # otherwise without a tag
                frame = honest.session.signed(frame)
        else:
            raw = connected(self.port, self.source)
        with raw, contextlib.suppress(ConnectionError):
            self.send(raw, frame)

    def send(self, raw: socket.socket, frame: bytes) -> None:
        """Send it somehow, and leave somehow."""
        if self.random.random() < 0.05:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in frame[:100]:
                raw.sendall(bytes([byte]))
        else:
            raw.sendall(frame)
        leave = self.random.random()
        if leave < 0.2:  # a reset
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif leave < 0.9:  # half-closed
            with contextlib.suppress(OSError):  # the server has been quicker
                raw.shutdown(socket.SHUT_WR)
            rest(raw)

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.randrange(1, 200))

    def flipped(self) -> bytes:
        frame = bytearray(self.random.choice(self.FRAMES))
        for _ in range(self.random.randint(1, 4)):
            frame[self.random.randrange(len(frame))] ^= self.random.randint(1, 255)
        return bytes(frame)

    def truncated(self) -> bytes:
        frame = self.random.choice(self.FRAMES)
        return frame[: self.random.randrange(1, len(frame))]

    def misshapen(self) -> bytes:
        """A header with one number that is wrong."""
        numbers = list(HEADER.unpack(head(self.random.choice(list(Op)))))
        wrong = self.random.choice([0, 1, 7, 255, 1 << 16, (1 << 20) + 1, 280 * MIB, 0xFFFFFFFF])
        numbers[self.random.choice([4, 5, 6])] = wrong
        numbers[3] = self.random.choice([0.0, float("nan"), float("inf"), -1.0])
        return HEADER.pack(*numbers) + self.noise()

    def other_version(self) -> bytes:
        return bytes([self.random.choice([0, 2, 255])]) + self.random.choice(self.FRAMES)[1:]

    def then_noise(self) -> bytes:
        return self.random.choice(self.FRAMES) + b"\xff" + self.noise()

    def wrong_key(self) -> bytes:
        return MAGIC + self.random.randbytes(NONCE + PROOF)

    def half_a_hello(self) -> bytes:
        return (MAGIC + self.random.randbytes(NONCE + PROOF))[: self.random.randrange(1, HELLO + PROOF)]

    def no_hello(self) -> bytes:
        return self.random.choice(self.FRAMES) * 3

    AFTER = (noise, flipped, flipped, truncated, misshapen, misshapen, other_version, then_noise)
    BEFORE = (noise, wrong_key, half_a_hello, no_hello)


def fuzz(frames: int, liars: int = 4, honest: int = 2) -> None:
    """Let liars send so many malformed frames while the honest work, and see what the honest find, and the memory."""
    ended = threading.Event()

    def work(me: int) -> int:
        """Do what a client does, until the liars have ended; return how often."""
        times = 0
        with client(server.port) as store:
            while not ended.is_set() or not times:
                key = f"honest {me} {times}"
                store.set(key, key * 10)
                store.queue_push(f"queue of {me}", key)
                assert store.add(f"count of {me}", 1) == times + 1
                assert store.queue_pop(f"queue of {me}") == key.encode()
                times += 1
            keys = [f"honest {me} {number}" for number in range(times)]
            assert store.multi_get(keys) == [key.encode() * 10 for key in keys]
        return times

    def lie(number: int) -> None:
        liar = Liar(server.port, number)
        for _ in range(frames // liars):
            liar.lie()

    with Process() as server, ThreadPoolExecutor() as pool:
        try:
            workers = [pool.submit(work, me) for me in range(honest)]
            lies = [pool.submit(lie, number) for number in range(liars)]
            with client(server.port) as store:
                store.set("begun", "")
                before = server.largest_memory()
                for each in lies:
                    each.result(600)
                ended.set()
                done = [each.result(PATIENCE) for each in workers]
                own = sum(key.startswith("honest") for key in store.list_keys())
                assert own == sum(done)
                grown = server.largest_memory() - before
        finally:
            ended.set()
    assert grown < 32 * MIB + 2000 * sum(done)  # what the honest have put there


def test_the_honest_lose_nothing_to_malformed_frames() -> None:
    fuzz(2_000)


@pytest.mark.slow
def test_the_honest_lose_nothing_to_many_malformed_frames() -> None:
    fuzz(100_000)


# -- the silent and the slow ---------------------------------------------------------------------------------------


def test_who_does_not_introduce_himself_is_dropped() -> None:
    with serving(handshake=0.2) as port, client(port) as honest:
        for said in (b"", MAGIC, MAGIC + bytes(NONCE), MAGIC + bytes(NONCE + PROOF - 1)):
            with connected(port) as raw:
                raw.sendall(said)
                assert len(rest(raw)) in (0, 1 + NONCE)
        honest.set("a", "1")
        assert honest.get("a") == b"1"


def test_who_stops_in_the_middle_of_a_message_is_dropped_and_who_is_idle_is_not() -> None:
    frame = wire.packed(Op.SET, ["a"], [b"1"])
    with serving(patience=0.2) as port, client(port) as honest, Introduced(port) as idle:
        honest.set("a", "0")
        for length in (1, HEADER.size, HEADER.size + 1, len(frame) - 1):
            with Introduced(port) as raw:
                raw.raw.sendall(frame[:length])
                assert rest(raw.raw) == b""
        assert honest.get("a") == b"0"
        idle.send(frame)
        assert idle.answer() == (Status.OK, [])


def test_who_waits_for_a_key_is_not_dropped() -> None:
    with serving(patience=0.2) as port, client(port) as store, ThreadPoolExecutor() as pool:
        got = pool.submit(store.get, "a")
        with pytest.raises(hc.DistTimeoutError):
            store.wait(["b"], 0.5)
        store.set("a", "1")
        assert got.result(PATIENCE) == b"1"


def until_there_is_room(port: int) -> None:
    """Connect as soon as the server takes another client."""
    for _ in range(600):
        with contextlib.suppress(hc.DistNetworkError):
            client(port).close()
            return
        time.sleep(0.1)
    pytest.fail("nobody was dropped")


def test_who_does_not_read_his_answers_is_dropped() -> None:
    with serving(patience=1.0, connections=2) as port, client(port) as honest:
        honest.set("a", bytes(MIB))
        with Introduced(port, buffer=1 << 12) as raw:
            raw.send(*[wire.packed(Op.GET, ["a"])] * 100)
            until_there_is_room(port)
            assert len(rest(raw.raw)) < 100 * MIB
        assert honest.get("a") == bytes(MIB)


def test_answers_that_nobody_reads_take_no_memory() -> None:
    with Process(patience=100) as server, client(server.port) as honest:
        honest.set("a", bytes(4 * MIB))
        honest.get("a")
        before = server.largest_memory()
        with Introduced(server.port, buffer=1 << 12) as raw:
            raw.send(*[wire.packed(Op.GET, ["a"])] * 200)
            for _ in range(200):
                honest.add("b", 1)
            assert server.largest_memory() - before < 40 * MIB
            assert raw.answer() == (Status.OK, [bytes(4 * MIB)])


# -- no room ----------------------------------------------------------------------------------------------------


def test_a_full_table_refuses_and_goes_on() -> None:
    with serving(capacity=MIB) as port, client(port) as store, client(port) as other:
        store.set("a", b"1")
        for refused in (
            lambda: store.set("b", bytes(MIB)),
            lambda: store.append("a", bytes(MIB)),
            lambda: store.queue_push("q", bytes(MIB)),
            lambda: store.compare_set("c", b"", bytes(MIB)),
            lambda: store.multi_set(["d", "e"], [bytes(MIB // 2)] * 2),
        ):
            with pytest.raises(hc.DistStoreError, match=r"the store is full: it holds \d+ of 1048576 bytes"):
                refused()
        assert other.list_keys() == ["a"]
        other.set("half", bytes(MIB // 2))
        with pytest.raises(hc.DistStoreError, match="delete_key what is no longer needed"):
            store.set("b", bytes(MIB // 2))
        assert other.delete_key("half")
        store.set("b", bytes(MIB // 2))
        assert other.get("a") == b"1"


def test_many_small_keys_fill_a_table_too() -> None:
    with serving(capacity=MIB) as port, client(port) as store:
        with pytest.raises(hc.DistStoreError, match="the store is full"):
            store.multi_set([str(number) for number in range(10_000)], [b""] * 10_000)
        assert store.num_keys() == 0


def test_a_connection_too_many_is_refused_and_the_others_go_on() -> None:
    with serving(connections=2) as port, client(port) as first:
        second = client(port)
        with pytest.raises(hc.DistNetworkError, match="it has 2 clients, as many as"):
            client(port)
        first.set("a", "1")
        assert second.get("a") == b"1"
        second.close()
        until_there_is_room(port)


def test_no_more_connections_than_the_system_allows() -> None:
    with Process(files=80) as server, contextlib.ExitStack() as stack:
        room = 80 - OTHER_FILES - 80 // 16  # the last are kept for those who have not shown the key
        clients = [stack.enter_context(client(server.port)) for _ in range(room)]
        with pytest.raises(hc.DistNetworkError, match=rf"it has {room} clients, .*type `ulimit -n 16384`"):
            client(server.port)
        clients[0].set("a", "1")
        assert clients[-1].get("a") == b"1"


# -- the many and the large ----------------------------------------------------------------------------------------


def test_a_value_of_64_mib_comes_back_as_it_was() -> None:
    value = random.Random(0).randbytes(64 * MIB)
    with serving() as port, client(port) as store, client(port) as other:
        store.set("a", value)
        assert other.get("a") == value
        other.append("a", b"end")
        assert store.get("a")[-4:] == value[-1:] + b"end"


def test_threads_share_a_store() -> None:
    def work(me: int) -> list[int]:
        tickets = []
        for number in range(50):
            store.set(f"{me}/{number}", str(me * number))
            assert store.get(f"{me}/{number}") == str(me * number).encode()
            tickets.append(store.add("tickets", 1))
        return tickets

    with serving() as port, client(port) as store, ThreadPoolExecutor(16) as pool:
        tickets = [ticket for tickets in pool.map(work, range(16)) for ticket in tickets]
    assert sorted(tickets) == list(range(1, 16 * 50 + 1))


def test_threads_that_wait_do_not_hold_up_the_others() -> None:
    with serving() as port, client(port) as store, ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(store.queue_pop, "q") for _ in range(12)]
        for number in range(12):
            store.queue_push("q", str(number))
        assert sorted(int(each.result(PATIENCE)) for each in waiting) == list(range(12))


@pytest.mark.parametrize("pairs", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_fifty_processes_lose_nothing(pairs: int) -> None:
    clients = 50
    with Process() as server, client(server.port) as store:
        program = [sys.executable, "-m", "tests.store.clients", "127.0.0.1", server.port, clients, pairs]
        ended = subprocess.run(
            list(map(str, program)),
            cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60 + pairs, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert store.add("count", 0) == clients * pairs
        assert store.num_keys() == clients * pairs + 1


# -- the dead ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def three_waiting(port: int, timeout: float) -> Iterator[list[Future[Any]]]:
    """Let clients wait in three ways for what nobody does."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        first, second, third = (stack.enter_context(client(port, timeout)) for _ in range(3))
        asked = [
            pool.submit(first.get, "never"), pool.submit(second.wait, ["never"]), pool.submit(third.queue_pop, "never")
        ]  # fmt: skip
        until(lambda: threads_in("_take") == 3, "three clients that have sent their requests")
        with client(port) as store:
            store.add("one round trip more, for the server to read them", 1)
        yield asked


def threads_in(function: str) -> int:
    """Return how many threads are inside a function of this name."""
    stacks = (traceback.walk_stack(frame) for frame in sys._current_frames().values())
    return sum(any(frame.f_code.co_name == function for frame, _ in stack) for stack in stacks)


def test_who_waits_for_a_master_that_is_killed_is_told_and_who_comes_later_too() -> None:
    with Process() as server, client(server.port) as later, three_waiting(server.port, PATIENCE) as waiting:
        os.kill(server.process.pid, signal.SIGKILL)
        for each in waiting:
            with pytest.raises(hc.DistNetworkError, match="has the process that holds it ended"):
                each.result(PATIENCE / 2)
        for _ in range(2):
            with pytest.raises(hc.DistNetworkError):
                later.set("a", "1")
        with pytest.raises(hc.DistNetworkError, match="can't be reached"):
            client(server.port, 0.5)


def test_who_waits_for_a_master_that_is_stopped_is_told_and_who_comes_later_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpccomm.store.tcp_store.GRACE", 0.5)
    with Process() as server, client(server.port) as patient, client(server.port, 0.5) as later:
        with three_waiting(server.port, 5.0) as waiting:
            os.kill(server.process.pid, signal.SIGSTOP)
            for each in waiting:
                with pytest.raises(hc.DistNetworkError, match=r"has not answered within 5.5 s"):
                    each.result(PATIENCE)
            with pytest.raises(hc.DistNetworkError, match="has not answered"):
                later.set("a", "1")
            with pytest.raises(hc.DistNetworkError, match="does not answer"):
                client(server.port, 0.5)
            os.kill(server.process.pid, signal.SIGCONT)
        patient.set("b", "1")
        assert patient.get("b") == b"1"


def test_who_waits_for_a_master_that_is_closed_is_told() -> None:
    with hc.TCPStore("127.0.0.1", 0, is_master=True, auth_key=KEY) as master:
        with three_waiting(master.port, PATIENCE) as waiting, connected(master.port) as raw:
            master.close()
            for each in waiting:
                with pytest.raises(hc.DistNetworkError, match="is gone"):
                    each.result(PATIENCE)
            assert rest(raw) == b""
        with pytest.raises(hc.DistStoreError, match="has been closed"):
            master.set("a", "1")


FORK = """
import os
import hpccomm as hc

with hc.TCPStore("127.0.0.1", 0, is_master=True, auth_key=b"a key of 16 bytes") as master:
    store = hc.TCPStore("127.0.0.1", master.port, auth_key=b"a key of 16 bytes", timeout=60)
    store.add("count", 1)
    end, told = os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(100):
            store.add("count", 1)
        store.set("child", "done")
        master.close()  # of the parent's nothing
        os.read(end, 1)  # with all the sockets that it has inherited
        os._exit(0)
    for _ in range(100):
        store.add("count", 1)
    store.get("child")
    print(store.add("count", 0))
    other = hc.TCPStore("127.0.0.1", master.port, auth_key=b"a key of 16 bytes", timeout=60)
for each in (other, store):
    try:
        each.get("child")
    except hc.DistNetworkError:
        print("ended")
os.write(told, b"x")
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_has_connections_of_its_own_and_keeps_no_master_alive() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (ended.stdout.split(), ended.stderr) == (["201", "ended", "ended", "0"], "")


@pytest.mark.parametrize(
    ("limits", "may_raise", "expected"),
    [
        ((1024, 4096), True, 4096),
        ((1024, 1 << 20), True, 20_000),
        ((1024, resource.RLIM_INFINITY), True, 20_000),
        ((1024, 4096), False, 1024),
        ((1 << 17, 1 << 20), True, 1 << 17),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), True, resource.RLIM_INFINITY),
    ],
)
def test_the_master_may_open_as_many_files_as_the_hard_limit_allows(
    limits: tuple[int, int], may_raise: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(_: int, wanted: tuple[int, int]) -> None:
        asked.append(wanted)
        if not may_raise:
            raise PermissionError

    monkeypatch.setattr(server.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(server.resource, "setrlimit", ask)
    assert server._allowed_files(20_000) == expected
    assert asked in ([], [(min(20_000, limits[1] if limits[1] > 0 else 20_000), limits[1])])


@pytest.mark.parametrize("clients", [100, 1000, 10_000])
def test_open_files_are_not_listed_for_each_few_clients(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    monkeypatch.setattr(server, "_allowed_files", lambda wanted: 20_000)
    monkeypatch.setattr(server.os, "listdir", lambda _: listed.append(_) or [0] * (50 + len(serving.clients)))
    serving = server.Server(KEY, Limits())
    now = [0.0]
    loop: Any = SimpleNamespace(time=lambda: now[0])
    nobody: Any = SimpleNamespace(accept=lambda: exec("raise BlockingIOError"))
    for number in range(clients):
        serving.clients.add(number)  # type: ignore[arg-type]
        now[0] = number * 3.0 / clients  # all of them come within three seconds
        serving._accept(loop, nobody)
        assert serving._free == pytest.approx(20_000 - OTHER_FILES - 50 - len(serving.clients), abs=1)
    assert len(listed) == 3

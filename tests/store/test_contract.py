"""What every store promises: one class of tests, run against each kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hpccomm as hc

pytestmark = pytest.mark.once

LONG = "k" * (16 << 10)


def opened(kind: str, folder: Path) -> hc.Store:
    if kind.startswith("prefix of "):
        return hc.PrefixStore("part", opened(kind.removeprefix("prefix of "), folder))
    if kind == "hash":
        return hc.HashStore(timeout=30)
    if kind == "file":
        return hc.FileStore(folder / "store", timeout=30)
    return hc.TCPStore("localhost", 0, is_master=True, timeout=30, auth_key=b"a key of 16 bytes")


@pytest.fixture(params=["hash", "file", "tcp", "prefix of hash", "prefix of file", "prefix of tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hc.Store]:
    store = opened(request.param, tmp_path)
    yield store
    store.close()
    if isinstance(store, hc.PrefixStore):
        store.underlying_store.close()


def in_a_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call`; return a function that waits for it and returns what it has, or raises it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert outcome, "the call has not ended"
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return result


class TestValues:
    @pytest.mark.parametrize("value", [b"", b"\x00\xff\x00", b"x" * 100_000], ids=["empty", "binary", "large"])
    def test_get_returns_what_was_set(self, store: hc.Store, value: bytes) -> None:
        store.set("key", value)
        assert store.get("key") == value

    @pytest.mark.parametrize("value", ["grün", bytearray("grün".encode()), memoryview("grün".encode())])
    def test_a_str_is_stored_as_utf8_and_every_kind_of_bytes_as_bytes(self, store: hc.Store, value: Any) -> None:
        store.set("key", value)
        got = store.get("key")
        assert type(got) is bytes
        assert got == "grün".encode()

    def test_more_keys_than_a_message_takes_are_refused(self, store: hc.Store) -> None:
        store.set("key", "value")
        keys = [str(i) for i in range(600_000)]
        with pytest.raises(ValueError, match=r"multi_set: 1200000 keys and values of \d+ bytes; at most 1048576"):
            store.multi_set(keys, [b""] * len(keys))
        with pytest.raises(ValueError, match=r"check: 1200000 keys and values of"):
            store.check(keys * 2)
        assert store.clone().get("key") == b"value"

    def test_values_that_a_message_has_no_room_for_are_refused(self, store: hc.Store) -> None:
        store.set("key", "value")
        large = bytes(150 << 20)
        with pytest.raises(ValueError, match=r"multi_set: 4 keys and values of 3\d+ bytes; at most"):
            store.multi_set(["a", "b"], [large, large])
        with pytest.raises(ValueError, match=r"compare_set: 3 keys and values of 3\d+ bytes; at most"):
            store.compare_set("key", large, large)
        assert store.clone().get("key") == b"value"

    @pytest.mark.parametrize("key", ["", "a/b", "ключ", " ", "a\nb"])
    def test_any_str_is_a_key(self, store: hc.Store, key: str) -> None:
        store.set(key, b"value")
        assert store.get(key) == b"value"
        assert store.list_keys() == [key]

    def test_set_replaces(self, store: hc.Store) -> None:
        store.set("key", b"longer than")
        store.set("key", b"this")
        assert store.get("key") == b"this"
        assert store.num_keys() == 1

    def test_get_waits_for_a_key(self, store: hc.Store) -> None:
        result = in_a_thread(lambda: store.get("key"))
        store.set("other", b"1")
        store.set("key", b"2")
        assert result() == b"2"

    def test_what_a_clone_sets_the_store_has(self, store: hc.Store) -> None:
        clone = store.clone()
        clone.set("key", b"value")
        assert store.get("key") == b"value"
        assert type(clone) is type(store)
        close(clone)
        assert store.get("key") == b"value"

    def test_add_counts_from_nothing_and_stores_text(self, store: hc.Store) -> None:
        assert [store.add("n", 5), store.add("n", -7), store.add("n", 0)] == [5, -2, -2]
        assert store.get("n") == b"-2"
        store.set("n", b"40")
        assert store.add("n", 2) == 42

    def test_add_of_many_threads_loses_nothing(self, store: hc.Store) -> None:
        clones = [store.clone() for _ in range(4)]
        results = [in_a_thread(lambda each=each: [each.add("n", 1) for _ in range(50)]) for each in clones]
        numbers = sorted(number for result in results for number in result())
        assert numbers == list(range(1, 201))
        for each in clones:
            close(each)

    def test_compare_set(self, store: hc.Store) -> None:
        assert store.compare_set("key", b"old", b"new") == b"old"  # there is none: c10d's answer
        assert not store.check(["key"])
        assert store.compare_set("key", b"", b"first") == b"first"
        assert store.compare_set("key", b"", b"second") == b"first"
        assert store.compare_set("key", b"first", b"second") == b"second"
        assert store.get("key") == b"second"

    def test_of_many_compare_sets_one_wins(self, store: hc.Store) -> None:
        clones = [store.clone() for _ in range(4)]
        results = [
            in_a_thread(lambda i=i, each=each: each.compare_set("leader", b"", b"%d" % i))
            for i, each in enumerate(clones)
        ]
        assert {result() for result in results} == {store.get("leader")}
        for each in clones:
            close(each)

    def test_append(self, store: hc.Store) -> None:
        store.append("key", b"one, ")
        store.append("key", "two")
        assert store.get("key") == b"one, two"

    def test_multi_set_and_multi_get_keep_the_order(self, store: hc.Store) -> None:
        store.multi_set(["b", "a", "c"], [b"2", "1", b""])
        assert store.multi_get(["c", "b", "a", "b"]) == [b"", b"2", b"1", b"2"]
        assert store.multi_get([]) == []

    def test_multi_get_waits_for_all(self, store: hc.Store) -> None:
        result = in_a_thread(lambda: store.multi_get(["a", "b"]))
        store.set("b", b"2")
        store.set("a", b"1")
        assert result() == [b"1", b"2"]

    def test_delete_key_says_whether_it_was_there(self, store: hc.Store) -> None:
        store.set("key", b"value")
        assert store.delete_key("key") is True
        assert store.delete_key("key") is False
        assert not store.check(["key"])


class TestKeys:
    def test_check(self, store: hc.Store) -> None:
        store.set("a", b"")
        assert store.check(["a"]) is True
        assert store.check(["a", "b"]) is False
        assert store.check([]) is True

    def test_wait_for_all_of_the_keys(self, store: hc.Store) -> None:
        result = in_a_thread(lambda: store.wait(["a", "b"]))
        store.set("a", b"")
        store.set("b", b"")
        assert result() is None

    def test_multi_get_waits_for_values_not_for_queues(self, store: hc.Store) -> None:
        store.set("value", "1")
        store.queue_push("both", "2")
        other = store.clone()
        got = in_a_thread(lambda: other.multi_get(["value", "both"]))
        short = store.clone()
        short.set_timeout(0.05)
        with pytest.raises(hc.DistTimeoutError, match="both"):
            short.multi_get(["value", "both"])
        store.set("both", "3")
        assert got() == [b"1", b"3"]

    @pytest.mark.parametrize("timeout", [float("inf"), timedelta.max])
    def test_a_wait_may_have_no_limit(self, store: hc.Store, timeout: Any) -> None:
        other = store.clone()
        ended = in_a_thread(lambda: other.wait(["key"], timeout))
        store.set("key", "value")
        ended()
        store.set_timeout(timeout)
        assert store.get("key") == b"value"

    @pytest.mark.parametrize("timeout", [0.05, timedelta(milliseconds=50), 0])
    def test_a_wait_in_vain_names_a_key_that_is_missing(self, store: hc.Store, timeout: Any) -> None:
        store.set("there", b"")
        with pytest.raises(hc.DistTimeoutError, match=r"^wait: nobody has set '(part/)?missing' within 0(\.05)? s"):
            store.wait(["there", "missing"], timeout)

    def test_the_stores_own_timeout(self, store: hc.Store) -> None:
        store.set_timeout(0.05)
        assert store.timeout == timedelta(seconds=0.05)
        with pytest.raises(hc.DistTimeoutError, match=r"^get: nobody has set"):
            store.get("missing")
        with pytest.raises(hc.DistTimeoutError, match=r"^multi_get: nobody has set"):
            store.multi_get(["missing", "too"])
        with pytest.raises(hc.DistTimeoutError, match=r"^queue_pop: nothing was put into the queue"):
            store.queue_pop("missing")

    def test_keys_are_counted_and_listed(self, store: hc.Store) -> None:
        assert (store.num_keys(), store.list_keys()) == (0, [])
        store.multi_set(["b", "a"], [b"", b""])
        store.add("n", 1)
        store.queue_push("queue", b"")
        store.delete_key("b")
        assert (store.num_keys(), store.list_keys()) == (2, ["a", "n"])

    def test_a_part_of_a_store_does_not_show_the_rest(self, store: hc.Store) -> None:
        part, other = hc.PrefixStore("x", store), hc.PrefixStore("xy", store)
        part.set("key", b"1")
        other.set("key", b"2")
        assert (part.list_keys(), part.num_keys(), part.get("key")) == (["key"], 1, b"1")
        assert store.list_keys() == ["x/key", "xy/key"]
        with part as closing:
            pass
        assert closing.is_closed
        assert store.get("xy/key") == b"2"


class TestQueues:
    def test_first_in_first_out(self, store: hc.Store) -> None:
        for value in (b"1", b"2", b"3"):
            store.queue_push("q", value)
        assert store.queue_len("q") == 3
        assert [store.queue_pop("q"), store.queue_pop("q", block=False), store.queue_pop("q")] == [b"1", b"2", b"3"]
        assert store.queue_len("q") == 0

    def test_pop_waits(self, store: hc.Store) -> None:
        result = in_a_thread(lambda: store.queue_pop("q"))
        store.queue_push("q", b"value")
        assert result() == b"value"

    def test_pop_of_an_empty_queue_without_waiting(self, store: hc.Store) -> None:
        with pytest.raises(hc.QueueEmptyError, match=r"^queue_pop: the queue '(part/)?q' is empty"):
            store.queue_pop("q", block=False)
        assert issubclass(hc.QueueEmptyError, hc.DistStoreError)

    def test_a_queue_is_not_the_value_of_its_name(self, store: hc.Store) -> None:
        store.set("q", b"value")
        store.queue_push("q", b"queued")
        assert (store.get("q"), store.queue_pop("q")) == (b"value", b"queued")

    def test_a_queue_can_be_waited_for_and_deleted(self, store: hc.Store) -> None:
        store.queue_push("q", b"value")
        store.wait(["q"])
        assert store.check(["q"])
        assert store.delete_key("q")
        assert store.queue_len("q") == 0
        assert not store.check(["q"])

    def test_each_element_goes_to_one_of_many(self, store: hc.Store) -> None:
        clones = [store.clone() for _ in range(4)]
        results = [in_a_thread(lambda each=each: [each.queue_pop("q") for _ in range(10)]) for each in clones]
        for i in range(40):
            store.queue_push("q", str(i))
        assert sorted(int(value) for result in results for value in result()) == list(range(40))
        for each in clones:
            close(each)


class TestMistakes:
    def test_add_to_what_is_no_integer_is_an_error_of_the_caller_alone(self, store: hc.Store) -> None:
        store.set("word", b"twelve")
        with pytest.raises(
            hc.DistStoreError, match=r"add: the value of '(part/)?word' is b'twelve', which is no integer"
        ):
            store.add("word", 1)
        assert store.get("word") == b"twelve"
        assert store.add("n", 1) == 1

    def test_add_beyond_64_bits(self, store: hc.Store) -> None:
        assert store.add("n", 2**63 - 1) == 2**63 - 1
        with pytest.raises(hc.DistStoreError, match="does not fit into 64 bits"):
            store.add("n", 1)
        assert store.add("n", -1) == 2**63 - 2
        with pytest.raises(ValueError, match="amount is 9223372036854775808, which does not fit"):
            store.add("n", 2**63)

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (lambda s: s.set(b"key", b""), TypeError, "set: key is b'key'; expected a str"),
            (lambda s: s.set("key", 1), TypeError, "set: value is 1; expected bytes or str"),
            (lambda s: s.set("key", None), TypeError, "set: value is None"),
            (lambda s: s.get(1), TypeError, "get: key is 1"),
            (lambda s: s.add("key", "1"), TypeError, "add: amount is '1'; expected an integer"),
            (lambda s: s.add("key", True), TypeError, "add: amount is True"),
            (lambda s: s.add("key", 1.0), TypeError, "add: amount is 1.0"),
            (lambda s: s.multi_set(["a"], []), ValueError, "multi_set: 1 keys, but 0 values"),
            (lambda s: s.multi_get("ab"), TypeError, "multi_get: keys is 'ab'; expected a list of str"),
            (lambda s: s.wait("ab"), TypeError, "wait: keys is 'ab'"),
            (lambda s: s.check("ab"), TypeError, "check: keys is 'ab'"),
            (lambda s: s.wait([], -1), ValueError, "timeout is -1; expected 0 or more"),
            (lambda s: s.set_timeout("long"), TypeError, "timeout is 'long'"),
            (lambda s: s.set_timeout(float("nan")), ValueError, "timeout is nan"),
            (lambda s: s.set(LONG + "k", b""), ValueError, "set: the key has 16385 bytes; at most 16384"),
            (lambda s: s.set("ü" * 8193, b""), ValueError, "set: the key has 16386 bytes"),
            (lambda s: s.set("\0own", b""), ValueError, "keys that begin with a NUL"),
        ],
    )
    def test_arguments(self, store: hc.Store, call: Any, error: type, message: str) -> None:
        with pytest.raises(error, match=message.replace("(", r"\(")):
            call(store)
        assert store.list_keys() == []

    def test_the_longest_key(self, store: hc.Store) -> None:
        key = LONG if not isinstance(store, hc.PrefixStore) else LONG[len("part/") :]
        store.set(key, b"value")
        assert store.get(key) == b"value"

    def test_a_closed_store_says_so(self, store: hc.Store) -> None:
        store.close()
        store.close()
        assert store.is_closed
        with pytest.raises(hc.DistStoreError, match=r"^set: the store .* has been closed"):
            store.set("key", b"")
        with pytest.raises(hc.DistStoreError, match="closed"):
            store.get("key")

    def test_integers_of_numpy_count(self, store: hc.Store) -> None:
        import numpy as np

        assert store.add("n", np.int32(3)) == 3


def close(store: hc.Store) -> None:
    """Close a clone: of a PrefixStore, also the store that was cloned with it."""
    store.close()
    if isinstance(store, hc.PrefixStore):
        store.underlying_store.close()


def test_a_part_of_a_closed_store_is_closed() -> None:
    store = hc.HashStore()
    part = hc.PrefixStore("part", store)
    store.close()
    with pytest.raises(hc.DistStoreError, match="closed"):
        part.get("key")


@pytest.mark.parametrize(("prefix", "store"), [(1, hc.HashStore()), ("p", None)])
def test_what_is_no_store_has_no_part(prefix: Any, store: Any) -> None:
    with pytest.raises(TypeError, match=r"^PrefixStore: (prefix|store) is"):
        hc.PrefixStore(prefix, store)


def test_a_store_of_the_programs_own_has_every_method() -> None:
    class Logged(hc.Store):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hc.HashStore()
            self.log: list[str] = []

        def request(self, request: Any, timeout: float) -> Any:
            self.log.append(request.op.name)
            return self.inner.request(request, timeout)

        def clone(self) -> hc.Store:
            return self

    store = Logged()
    store.set("a", b"1")
    store.multi_set(["b"], [b"2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert hc.PrefixStore("p", store).add("n", 1) == 1
    assert store.log == ["SET", "SET", "GET", "ADD"]

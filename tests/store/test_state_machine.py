"""Random operations on every kind of store, beside a dict and a few deques that do the same."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import hpccomm as hc

pytestmark = pytest.mark.once

Make = Callable[[], hc.Store]
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],
)
# Few keys, so that operations meet: an ordinary one, one that begins with another, those that prefixes make look alike.
KEYS = st.sampled_from(["", "a", "a/a", "ab", "p/a", "käse", "\x01", "long" * 20])
VALUES = st.sampled_from([b"", b"0", b"-12", b"x", b"\0\xff", b"9223372036854775807", b"long" * 20])
SOME_KEYS = st.lists(KEYS, max_size=4)
STRANGER = "somebody else's"


class Machine(RuleBasedStateMachine):
    """Two stores of one table, `values` and `queues`, which say what they have to hold."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.stores = [make()]
        self.stores.append(self.stores[0].clone())
        self.turns = itertools.cycle((0, 1))
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}

    def teardown(self) -> None:
        for store in reversed(self.stores):  # the first one may be a master
            store.close()

    @property
    def store(self) -> hc.Store:
        return self.stores[next(self.turns)]

    def is_there(self, keys: list[str]) -> bool:
        return all(key in self.values or self.queues.get(key) for key in keys)

    @rule(key=KEYS, value=VALUES)
    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)
        self.values[key] = value

    @rule(items=st.dictionaries(KEYS, VALUES, max_size=4))
    def multi_set(self, items: dict[str, bytes]) -> None:
        self.store.multi_set(list(items), list(items.values()))
        self.values |= items

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        if key in self.values:
            assert self.store.get(key) == self.values[key]
        else:
            with waiting_for_nothing(self.store) as store, pytest.raises(hc.DistTimeoutError, match="get"):
                store.get(key)

    @rule(keys=SOME_KEYS)
    def multi_get(self, keys: list[str]) -> None:
        if all(key in self.values for key in keys):
            assert self.store.multi_get(keys) == [self.values[key] for key in keys]
        else:
            with waiting_for_nothing(self.store) as store, pytest.raises(hc.DistTimeoutError):
                store.multi_get(keys)

    @rule(key=KEYS, amount=st.integers(-3, 3) | st.sampled_from([-(2**63), 2**63 - 1]))
    def add(self, key: str, amount: int) -> None:
        found = self.values.get(key, b"0")
        is_number = found.removeprefix(b"-").isdigit()
        if is_number and -(2**63) <= int(found) + amount < 2**63:
            total = int(found) + amount
            assert self.store.add(key, amount) == total
            self.values[key] = str(total).encode()
        else:
            with pytest.raises(hc.DistStoreError, match="64 bits" if is_number else "no integer"):
                self.store.add(key, amount)

    @rule(key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> None:
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        assert self.store.compare_set(key, expected, desired) == self.values.get(key, expected)

    @rule(key=KEYS, value=VALUES)
    def append(self, key: str, value: bytes) -> None:
        self.store.append(key, value)
        self.values[key] = self.values.get(key, b"") + value

    @rule(key=KEYS)
    def delete_key(self, key: str) -> None:
        assert self.store.delete_key(key) == self.is_there([key])
        self.values.pop(key, None)
        self.queues.pop(key, None)

    @rule(keys=SOME_KEYS)
    def check(self, keys: list[str]) -> None:
        assert self.store.check(keys) == self.is_there(keys)

    @rule(keys=SOME_KEYS)
    def wait(self, keys: list[str]) -> None:
        if self.is_there(keys):
            self.store.wait(keys)
        else:
            with pytest.raises(hc.DistTimeoutError, match="nobody has set"):
                self.store.wait(keys, 0)

    @rule(key=KEYS, value=VALUES)
    def queue_push(self, key: str, value: bytes) -> None:
        self.store.queue_push(key, value)
        self.queues.setdefault(key, deque()).append(value)

    @rule(key=KEYS, block=st.booleans())
    def queue_pop(self, key: str, block: bool) -> None:
        if self.queues.get(key):
            assert self.store.queue_pop(key, block) == self.queues[key].popleft()
        else:
            error = hc.DistTimeoutError if block else hc.QueueEmptyError
            with waiting_for_nothing(self.store) as store, pytest.raises(error):
                store.queue_pop(key, block)

    @rule(key=KEYS)
    def queue_len(self, key: str) -> None:
        assert self.store.queue_len(key) == len(self.queues.get(key, ()))

    @rule()
    def clone(self) -> None:
        self.stores.pop().close()
        self.stores.append(self.stores[0].clone())

    @invariant()
    def keys(self) -> None:
        store = self.store
        assert store.list_keys() == sorted(self.values)
        assert store.num_keys() == len(self.values)


class waiting_for_nothing:
    """A block in which a store waits for nothing."""

    def __init__(self, store: hc.Store) -> None:
        self.store = store
        self.timeout = store.timeout

    def __enter__(self) -> hc.Store:
        self.store.set_timeout(0)
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.set_timeout(self.timeout)


def tcp() -> hc.Store:
    return hc.TCPStore("127.0.0.1", 0, is_master=True, auth_key=b"a key of 16 bytes")


def part_of(make: Make) -> Make:
    """Return what makes a part of a store in which others have keys, too."""

    def made() -> hc.Store:
        whole = make()
        for prefix in ("", "p"):
            hc.PrefixStore(f"{prefix}{STRANGER}", whole).set("a", b"not yours")
        part = hc.PrefixStore("p", whole)
        close = part.close
        part.close = lambda: (close(), whole.close())  # type: ignore[method-assign,func-returns-value]
        return part

    return made


@pytest.fixture
def kinds(tmp_path: Path) -> dict[str, Make]:
    numbers = itertools.count()
    kinds: dict[str, Make] = {
        "hash": hc.HashStore,
        "file": lambda: hc.FileStore(tmp_path / str(next(numbers))),
        "tcp": tcp,
    }
    return kinds | {f"prefix-{name}": part_of(make) for name, make in kinds.items()}


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix-hash", "prefix-file", "prefix-tcp"])
def test_any_operations_in_any_order_do_what_they_do_to_a_dict(kind: str, kinds: dict[str, Make]) -> None:
    run_state_machine_as_test(lambda: Machine(kinds[kind]), settings=SETTINGS)

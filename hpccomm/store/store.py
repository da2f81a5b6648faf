"""Store: the base class of all key-value stores; PrefixStore: a part of another store."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..core.timeouts import as_seconds
from ..errors import DistStoreError, DistTimeoutError, on_rank
from .table import HIDDEN, LARGEST_KEY, LARGEST_MESSAGE, LARGEST_VALUE, MOST_FIELDS, Answer, Op, Request

if TYPE_CHECKING:
    from typing import Self

DEFAULT_TIMEOUT = 300.0  # seconds, as in c10d

Value = str | bytes | bytearray | memoryview
Timeout = timedelta | float


class Store(ABC):
    """A table of values by key, in which processes find each other and agree. Abstract.

    Keys are str, at most 16 KiB in UTF-8. Values are bytes, at most 256 MiB; a str is stored as UTF-8. Each operation
    is atomic. Several threads may use a store. All kinds raise the same errors: DistStoreError if an operation is
    refused or the store is closed, DistTimeoutError if a key is not set in time, DistNetworkError if the store can't be
    reached, TypeError and ValueError for bad arguments.

    A subclass overrides `request`, `close` and `clone`; every other method calls `request`. As a context manager, a
    store is closed at the end of the block.

    Parameters
    ----------
    timeout : timedelta or float (seconds), optional
        The time that `get`, `wait`, `multi_get` and `queue_pop` wait. Default: 5 minutes.

    Notes
    -----
    Semantics: c10d's stores, with deliberate differences. A wait that takes too long raises DistTimeoutError.
    `num_keys` and `list_keys` of a PrefixStore cover its own keys only; no store shows internal keys. `wait` and
    `check` accept queues like values, but `num_keys` and `list_keys` leave them out.

    Examples
    --------
    >>> store = hc.HashStore()
    >>> store.set("colour", "red")
    >>> store.get("colour")
    b'red'
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout = _seconds(timeout)
        self._is_closed = False

    # -- to override in a kind of store -------------------------------------------------------------

    @abstractmethod
    def request(self, request: Request, timeout: float) -> Answer:
        """Return the answer to `request`; raise DistTimeoutError if it waits longer than `timeout` seconds."""

    @abstractmethod
    def clone(self) -> Store:
        """Return another store of the same table, with connections of its own."""

    def close(self) -> None:
        """Close connections and files; every later operation raises DistStoreError."""
        self._is_closed = True

    # -- values -------------------------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`; replace an old value."""
        self._ask(Op.SET, (key,), (value,))

    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait until it is set.

        Raises
        ------
        DistTimeoutError
            It was not set within the store's timeout.
        """
        return self._ask(Op.GET, (key,)).values[0]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer that `key` holds as text (0 if it is missing), and return the sum.

        Raises
        ------
        DistStoreError
            The value is no integer, or the sum does not fit into 64 bits; the value does not change.

        Examples
        --------
        >>> store = hc.HashStore()
        >>> store.add("ticket", 1), store.add("ticket", 1)
        (1, 2)
        """
        if isinstance(amount, bool) or not hasattr(amount, "__index__"):
            raise TypeError(f"add: amount is {amount!r}; expected an integer{on_rank()}")
        number = amount.__index__()
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"add: amount is {number}, which does not fit into 64 bits{on_rank()}")
        return self._ask(Op.ADD, (key,), number=number).number

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if its value is `expected`, or missing and `expected` is empty; return its value.

        If the key is still missing, return `expected`.

        Examples
        --------
        >>> store = hc.HashStore()
        >>> store.compare_set("leader", "", "rank 3"), store.compare_set("leader", "", "rank 5")
        (b'rank 3', b'rank 3')
        """
        return self._ask(Op.COMPARE_SET, (key,), (expected, desired)).values[0]

    def append(self, key: str, value: Value) -> None:
        """Add `value` to the end of the value of `key`."""
        self._ask(Op.APPEND, (key,), (value,))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store `values` under `keys` atomically; both have the same length."""
        keys, values = _listed("multi_set", keys), tuple(values)
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys, but {len(values)} values{on_rank()}")
        self._ask(Op.SET, keys, values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all `keys` are set; return their values, read atomically."""
        return list(self._ask(Op.GET, _listed("multi_get", keys)).values)

    def delete_key(self, key: str) -> bool:
        """Delete the value or queue of `key`; return True if there was one."""
        return bool(self._ask(Op.DELETE, (key,)).number)

    # -- keys ---------------------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all `keys` exist, without waiting."""
        return bool(self._ask(Op.CHECK, _listed("check", keys)).number)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` exist, for at most `timeout` (default: the store's).

        Raises
        ------
        DistTimeoutError
            A key was missing all the time; the message names one.
        """
        self._ask(Op.WAIT, _listed("wait", keys), timeout=None if timeout is None else _seconds(timeout))

    def num_keys(self) -> int:
        """Return the number of keys that have a value."""
        return self._ask(Op.COUNT, ("",)).number

    def list_keys(self) -> list[str]:
        """Return the keys that have a value, sorted."""
        return [str(key, "utf-8") for key in self._ask(Op.LIST, ("",)).values]

    # -- queues -------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`, which is separate from the value of the same key.

        Examples
        --------
        >>> store = hc.HashStore()
        >>> store.queue_push("work", "first")
        >>> store.queue_push("work", "second")
        >>> store.queue_pop("work"), store.queue_len("work")
        (b'first', 1)
        """
        self._ask(Op.PUSH, (key,), (value,))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue `key`; if `block`, wait until there is one.

        Raises
        ------
        DistTimeoutError
            The queue was empty for the store's timeout.
        QueueEmptyError
            The queue is empty, and `block` is False.
        """
        return self._ask(Op.POP, (key,), number=bool(block)).values[0]

    def queue_len(self, key: str) -> int:
        """Return the length of the queue `key`."""
        return self._ask(Op.LENGTH, (key,)).number

    # -- the store itself ----------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of operations."""
        self._timeout = _seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return True: the store has `append`, `multi_get`, `multi_set` and queues. The name is c10d's."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self,
        op: Op,
        keys: Sequence[str],
        values: Sequence[Value] = (),
        number: int = 0,
        timeout: float | None = None,
    ) -> Answer:
        """Check the arguments of a request and return its answer; every method calls it."""
        if self.is_closed:
            raise DistStoreError(f"{_name(op, keys)}: the store {self!r} has been closed{on_rank()}")
        checked = tuple([_key(op, key) for key in keys]), tuple([_value(op, keys, value) for value in values])
        _fit(op, *checked)
        return self.request(Request(op, *checked, number), self._timeout if timeout is None else timeout)


class PrefixStore(Store):
    """A part of another store, in which each key has a prefix: ``prefix/key``.

    Closing it leaves the other store open.

    Examples
    --------
    >>> store = hc.HashStore()
    >>> mine = hc.PrefixStore("mine", store)
    >>> mine.set("colour", "red")
    >>> store.list_keys(), mine.list_keys()
    (['mine/colour'], ['colour'])
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore: store is {store!r}; expected a Store{on_rank()}")
        if not isinstance(prefix, str):
            raise TypeError(f"PrefixStore: prefix is {prefix!r}; expected a str{on_rank()}")
        super().__init__(store.timeout)
        self.prefix = prefix
        self.underlying_store = store

    def request(self, request: Request, timeout: float) -> Answer:
        """Return the other store's answer to `request`, with the prefix before each key."""
        prefix = f"{self.prefix}/"
        keys = tuple([_key(request.op, prefix + key) for key in request.keys])
        _fit(request.op, keys, request.values)
        answer = self.underlying_store.request(request._replace(keys=keys), timeout)
        if request.op == Op.LIST:
            skip = len(prefix.encode())
            answer = answer._replace(values=tuple([key[skip:] for key in answer.values]))
        return answer

    @property
    def is_closed(self) -> bool:
        """True after `close` of this store or the other one."""
        return self._is_closed or self.underlying_store.is_closed

    def clone(self) -> PrefixStore:
        """Return another PrefixStore, on a clone of the other store."""
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.underlying_store!r})"


def too_late(request: Request, timeout: float, key: str) -> DistTimeoutError:
    """Return the error for a request whose `key` was not set in time."""
    return DistTimeoutError(
        f"{_name(request.op, request.keys)}: nobody has set {key!r} within {timeout:g} s{on_rank()}"
        if request.op != Op.POP
        else f"queue_pop: nothing was put into the queue {key!r} within {timeout:g} s{on_rank()}"
    )


def _name(op: Op, keys: Sequence[str]) -> str:
    """Return the name of the method that the program called."""
    name = _NAMES[op]
    return f"multi_{name}" if op in (Op.SET, Op.GET) and len(keys) != 1 else name


_METHODS = "set get add compare_set wait check delete_key num_keys append queue_push queue_pop queue_len list_keys"
_NAMES = dict(zip(Op, _METHODS.split(), strict=True))


def _key(op: Op, key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{_NAMES[op]}: key is {key!r}; expected a str{on_rank()}")
    nbytes = len(key) if key.isascii() else len(key.encode())
    if nbytes > LARGEST_KEY:
        raise ValueError(f"{_NAMES[op]}: the key has {nbytes} bytes; at most {LARGEST_KEY} are allowed{on_rank()}")
    if key.startswith(HIDDEN):
        raise ValueError(f"{_NAMES[op]}: key is {key!r}; keys that begin with a NUL are the store's own{on_rank()}")
    return key


def _value(op: Op, keys: Sequence[str], value: Value) -> bytes:
    if isinstance(value, str):
        data = value.encode()
    elif isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    else:
        raise TypeError(f"{_name(op, keys)}: value is {value!r}; expected bytes or str{on_rank()}")
    if len(data) > LARGEST_VALUE:
        raise ValueError(f"{_name(op, keys)}: the value has {len(data)} bytes; at most {LARGEST_VALUE} fit{on_rank()}")
    return data


def _fit(op: Op, keys: tuple[str, ...], values: tuple[bytes, ...]) -> None:
    """Raise an error if the keys and values of a request are more than a message has room for."""
    count = len(keys) + len(values)
    if count <= 2:  # a key and a value always fit
        return
    nbytes = 4 * count + sum(len(key.encode()) for key in keys) + sum(map(len, values))
    if count > MOST_FIELDS or nbytes > LARGEST_MESSAGE:
        raise ValueError(
            f"{_name(op, keys)}: {count} keys and values of {nbytes} bytes; "
            f"at most {MOST_FIELDS} of {LARGEST_MESSAGE} bytes go at once{on_rank()}"
        )


def _listed(name: str, keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"{name}: keys is {keys!r}; expected a list of str{on_rank()}")
    return tuple(keys)


def _seconds(timeout: Timeout) -> float:
    seconds = as_seconds(timeout)
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"timeout is {timeout!r}; expected 0 or more{on_rank()}")
    return min(seconds, timedelta.max.total_seconds() / 2)

"""Store: the base class of all key-value stores; PrefixStore: a part of another store."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..core.timeouts import as_seconds
from ..errors import DistStoreError, DistTimeoutError, on_rank
from .table import HIDDEN, LARGEST_KEY, LARGEST_VALUE, Answer, Op, Request

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_TIMEOUT = 300.0  # seconds, as in c10d

Value = str | bytes | bytearray | memoryview
Timeout = timedelta | float


class Store(ABC):
    """A table of values by key, through which processes find each other and agree. Abstract.

    Keys are str, at most 16 KiB in UTF-8. Values are bytes, at most 256 MiB; a str is stored as UTF-8. Each operation
    is atomic. A store may be used by several threads. All kinds raise the same errors: DistStoreError where an
    operation is refused or a store is closed, DistTimeoutError where a key has not come in time, DistNetworkError where
    a store can't be reached; TypeError and ValueError for arguments.

    A class of your own overrides `request`, `close` and `clone`; every other method passes through `request`.
    As a context manager a store is closed at the end of the block.

    Parameters
    ----------
    timeout : timedelta or float (seconds), optional
        How long `get`, `wait`, `multi_get` and `queue_pop` wait. Default: 5 minutes.

    Notes
    -----
    Semantics: c10d's stores. Different on purpose: a wait that is too long raises DistTimeoutError; `num_keys` and
    `list_keys` of a PrefixStore are those of its own keys, and none of any store's bookkeeping; queues are waited for
    and checked like values, but not listed or counted.

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

    # -- for a kind of store to override -----------------------------------------------------------

    @abstractmethod
    def request(self, request: Request, timeout: float) -> Answer:
        """Return the answer to `request`; where it waits, DistTimeoutError after `timeout` seconds."""

    @abstractmethod
    def clone(self) -> Store:
        """Return another store of the same table, with connections of its own."""

    def close(self) -> None:
        """Close connections and files; every later operation raises DistStoreError."""
        self._is_closed = True

    # -- values -------------------------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`, in place of the old one."""
        self._ask(Op.SET, (key,), (value,))

    def get(self, key: str) -> bytes:
        """Return the value of `key`, after a wait for it if need be.

        Raises
        ------
        DistTimeoutError
            It has not come within the store's timeout.
        """
        return self._ask(Op.GET, (key,)).values[0]

    def add(self, key: str, amount: int) -> int:
        """Return the sum of `amount` and the integer that `key` holds as text (0 if it is not there), and store it.

        Raises
        ------
        DistStoreError
            The value is no integer, or the sum does not fit into 64 bits; nothing has changed.

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

        Where there is still none, `expected` comes back.

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
        """Store each of `values` under its key, all at once; there are as many values as keys."""
        keys, values = _listed("multi_set", keys), tuple(values)
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys, but {len(values)} values{on_rank()}")
        self._ask(Op.SET, keys, values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all `keys`, of one moment; wait until they are there."""
        return list(self._ask(Op.GET, _listed("multi_get", keys)).values)

    def delete_key(self, key: str) -> bool:
        """Delete the value or queue of `key`; return True if there was one."""
        return bool(self._ask(Op.DELETE, (key,)).number)

    # -- keys ---------------------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all of `keys` are there, without waiting."""
        return bool(self._ask(Op.CHECK, _listed("check", keys)).number)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all of `keys` are there, for `timeout` (default: the store's).

        Raises
        ------
        DistTimeoutError
            They have not come in time; the message names one that is missing.
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
        """Put `value` at the end of the queue `key`, which is apart from the value of the same key.

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
            None has come within the store's timeout.
        QueueEmptyError
            There is none, and `block` is False.
        """
        return self._ask(Op.POP, (key,), number=bool(block)).values[0]

    def queue_len(self, key: str) -> int:
        """Return the length of the queue `key`."""
        return self._ask(Op.LENGTH, (key,)).number

    # -- the store itself ----------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True once `close` has been called."""
        return self._is_closed

    @property
    def timeout(self) -> timedelta:
        """The time-out of operations."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the time-out of operations."""
        self._timeout = _seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return True: there are `append`, `multi_get`, `multi_set` and queues, as c10d's method of this name asks."""
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
        answer = self.underlying_store.request(request._replace(keys=keys), timeout)
        if request.op == Op.LIST:
            skip = len(prefix.encode())
            answer = answer._replace(values=tuple([key[skip:] for key in answer.values]))
        return answer

    @property
    def is_closed(self) -> bool:
        """True once this store or the other one has been closed."""
        return self._is_closed or self.underlying_store.is_closed

    def clone(self) -> PrefixStore:
        """Return another PrefixStore, on a clone of the other store."""
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.underlying_store!r})"


def too_late(request: Request, timeout: float, key: str) -> DistTimeoutError:
    """Return the error of a request whose `key` has not come in time."""
    return DistTimeoutError(
        f"{_name(request.op, request.keys)}: nobody has set {key!r} within {timeout:g} s{on_rank()}"
        if request.op != Op.POP
        else f"queue_pop: nothing was put into the queue {key!r} within {timeout:g} s{on_rank()}"
    )


def _name(op: Op, keys: Sequence[str]) -> str:
    """Return the name of the method that a program has called."""
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


def _listed(name: str, keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"{name}: keys is {keys!r}; expected a list of str{on_rank()}")
    return tuple(keys)


def _seconds(timeout: Timeout) -> float:
    seconds = as_seconds(timeout)
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"timeout is {timeout!r}; expected 0 or more{on_rank()}")
    return min(seconds, timedelta.max.total_seconds() / 2)

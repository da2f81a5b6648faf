"""Requests, answers, and the table that every store applies them to.

Kinds of stores differ only in the method `request`: how it passes a request to the table, and how it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from ..errors import DistStoreError

LARGEST_KEY = 16 << 10  # bytes
LARGEST_VALUE = 256 << 20
LARGEST_MESSAGE = LARGEST_VALUE + (32 << 20)  # bytes of the keys and values of a request, and 4 more for each
MOST_FIELDS = 1 << 20  # keys and values
HIDDEN = "\0"  # keys that begin with it are internal
OVERHEAD = 200  # bytes that an entry takes besides its key and value


class QueueEmptyError(DistStoreError):
    """``queue_pop(key, block=False)`` found nothing."""


class Op(IntEnum):
    """The operations, with their numbers on the wire and in the file."""

    SET = 1
    GET = 2  # of one or more keys; waits until all of them exist
    ADD = 3
    COMPARE_SET = 4
    WAIT = 5
    CHECK = 6
    DELETE = 7
    COUNT = 8  # of the keys with the given prefix
    APPEND = 9
    PUSH = 10
    POP = 11
    LENGTH = 12
    LIST = 13


READS = frozenset({Op.GET, Op.WAIT, Op.CHECK, Op.COUNT, Op.LENGTH, Op.LIST})
WAITS = frozenset({Op.GET, Op.WAIT, Op.POP})  # until their keys exist


class Request(NamedTuple):
    """A client's request."""

    op: Op
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0  # ADD: the amount; POP: 0 to fail instead of waiting


class Answer(NamedTuple):
    """The answer to a request: values (LIST: keys), or a number."""

    values: tuple[bytes, ...] = ()
    number: int = 0


class Table:
    """Values and queues by key; a request that would need more than `capacity` bytes is refused."""

    def __init__(self, capacity: int | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.capacity = capacity
        self.nbytes = 0

    def apply(self, request: Request) -> Answer | None:
        """Return the answer to `request`, or None if it must wait; a DistStoreError refuses it without a change."""
        return _OPERATIONS[request.op](self, request)

    def missing(self, request: Request) -> str | None:
        """Return a key that `request` has to wait for, or None."""
        if request.op == Op.POP:
            return None if self.queues.get(request.keys[0]) else request.keys[0]
        there = self.values.__contains__ if request.op == Op.GET else self._has
        return next((key for key in request.keys if not there(key)), None)

    def _has(self, key: str) -> bool:
        return key in self.values or key in self.queues

    def _put(self, items: dict[str, bytes]) -> None:
        """Set `items` if their size is allowed."""
        growth = 0
        for key, value in items.items():
            if len(value) > LARGEST_VALUE:
                raise DistStoreError(f"the value of {key!r} would have {len(value)} bytes; at most {LARGEST_VALUE} fit")
            old = self.values.get(key)
            growth += len(value) - len(old) if old is not None else _size(key, value)
        self._grow(growth)
        self.values.update(items)

    def _grow(self, nbytes: int) -> None:
        if self.capacity is not None and nbytes > 0 and self.nbytes + nbytes > self.capacity:
            raise DistStoreError(
                f"the store is full: it holds {self.nbytes} of {self.capacity} bytes, and this needs {nbytes}; "
                f"delete_key what is no longer needed"
            )
        self.nbytes += nbytes

    def _set(self, request: Request) -> Answer:
        self._put(dict(zip(request.keys, request.values, strict=True)))
        return Answer()

    def _get(self, request: Request) -> Answer | None:
        try:
            return Answer(tuple(map(self.values.__getitem__, request.keys)))
        except KeyError:
            return None

    def _add(self, request: Request) -> Answer:
        (key,) = request.keys
        value = self.values.get(key, b"0")
        try:
            total = int(value) + request.number
        except ValueError:
            raise DistStoreError(f"add: the value of {key!r} is {_shown(value)}, which is no integer") from None
        if not -(2**63) <= total < 2**63:
            raise DistStoreError(f"add: {key!r} would be {total}, which does not fit into 64 bits")
        self._put({key: b"%d" % total})
        return Answer(number=total)

    def _compare_set(self, request: Request) -> Answer:
        (key,), (expected, desired) = request.keys, request.values
        found = self.values.get(key)
        if found == expected or (found is None and not expected):
            self._put({key: desired})
            found = desired
        return Answer((expected if found is None else found,))

    def _wait(self, request: Request) -> Answer | None:
        return Answer() if all(map(self._has, request.keys)) else None

    def _check(self, request: Request) -> Answer:
        return Answer(number=all(map(self._has, request.keys)))

    def _delete(self, request: Request) -> Answer:
        (key,) = request.keys
        value, queue = self.values.pop(key, None), self.queues.pop(key, ())
        self.nbytes -= sum(_size(key, each) for each in (value, *queue) if each is not None)
        return Answer(number=value is not None or bool(queue))

    def _count(self, request: Request) -> Answer:
        return Answer(number=len(self._beginning_with(request.keys[0])))

    def _append(self, request: Request) -> Answer:
        (key,), (more,) = request.keys, request.values
        self._put({key: self.values.get(key, b"") + more})
        return Answer()

    def _push(self, request: Request) -> Answer:
        (key,), (value,) = request.keys, request.values
        self._grow(_size(key, value))
        self.queues.setdefault(key, deque()).append(value)
        return Answer()

    def _pop(self, request: Request) -> Answer | None:
        (key,) = request.keys
        queue = self.queues.get(key)
        if queue is None:
            if request.number:
                return None
            raise QueueEmptyError(f"queue_pop: the queue {key!r} is empty; block=True waits")
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        self.nbytes -= _size(key, value)
        return Answer((value,))

    def _length(self, request: Request) -> Answer:
        return Answer(number=len(self.queues.get(request.keys[0], ())))

    def _list(self, request: Request) -> Answer:
        return Answer(tuple(key.encode() for key in sorted(self._beginning_with(request.keys[0]))))

    def _beginning_with(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix) and not key.startswith(HIDDEN)]


_OPERATIONS: dict[Op, Callable[[Table, Request], Answer | None]] = {
    op: getattr(Table, f"_{op.name.lower()}") for op in Op
}


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + OVERHEAD


def _shown(value: bytes) -> str:
    return repr(value) if len(value) <= 40 else f"{value[:40]!r} ..."

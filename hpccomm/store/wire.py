"""Requests and answers as bytes, sent by TCPStore and written by FileStore.

A message is a header, the length of each field, and the fields: the keys (UTF-8), then the values. Numbers are
little-endian. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .table import LARGEST_KEY, LARGEST_MESSAGE, MOST_FIELDS, Op, Request

VERSION = 2
LONGEST_WAIT = 1e15
HEADER = struct.Struct("<BBqdIII")  # version, code, number, seconds, count of keys, count of values, bytes that follow


class Status:
    """The codes of the server's messages."""

    OK = 0
    TOO_LATE = 1  # value: the missing key
    REFUSED = 2  # value: the reason
    EMPTY = 3  # the same, for a queue
    MALFORMED = 4  # value: the reason; the server then closes the connection


class Header(NamedTuple):
    """The beginning of a message; `code` is an Op or a Status, `seconds` a request's timeout."""

    version: int
    code: int
    number: int
    seconds: float
    keys: int
    values: int
    length: int


class MalformedError(ValueError):
    """The bytes are not a message; the exception's text is the reason."""


def packed(
    code: int, keys: Sequence[str] = (), values: Sequence[bytes] = (), number: int = 0, seconds: float = 0.0
) -> bytes:
    """Return a message as bytes."""
    fields = [*(key.encode() for key in keys), *values]
    lengths = struct.pack(f"<{len(fields)}I", *map(len, fields))
    body = len(lengths) + sum(map(len, fields))
    header = HEADER.pack(VERSION, code, number, seconds, len(keys), len(values), body)
    return b"".join((header, lengths, *fields))


def header(data: bytes | bytearray) -> Header:
    """Return the header of a message; raise MalformedError if the bytes are none."""
    if len(data) < HEADER.size:
        raise MalformedError(f"{len(data)} bytes")
    result = Header._make(HEADER.unpack(data))
    if result.version != VERSION:
        raise MalformedError(f"version {result.version} of the protocol; this is version {VERSION}")
    if not 0 <= result.seconds < LONGEST_WAIT:  # excludes NaN, too
        raise MalformedError(f"a wait of {result.seconds} seconds")
    count = result.keys + result.values
    if count > MOST_FIELDS or not 4 * count <= result.length <= LARGEST_MESSAGE:
        raise MalformedError(f"{result.keys} keys and {result.values} values in {result.length} bytes")
    return result


def fields(header: Header, body: bytes | bytearray | memoryview) -> list[bytes]:
    """Return the keys and values of a message."""
    count = header.keys + header.values
    if len(body) != header.length:
        raise MalformedError(f"a body of {len(body)} bytes in the place of {header.length}")
    lengths = struct.unpack_from(f"<{count}I", body)
    ends = list(accumulate(lengths, initial=4 * count))
    if ends[-1] != len(body):
        raise MalformedError(f"fields of {sum(lengths)} bytes in a body of {len(body)}")
    view = memoryview(body)
    return [bytes(view[begin:end]) for begin, end in pairwise(ends)]


def request(header: Header, body: bytes | bytearray | memoryview) -> Request:
    """Return the request in a message; raise MalformedError if there is none."""
    op = _OPS.get(header.code)
    if op is None:
        raise MalformedError(f"operation {header.code}")
    parts = fields(header, body)
    keys, values = _SHAPES[op]
    if keys not in (ANY, header.keys) or header.values != (header.keys if values == ANY else values):
        raise MalformedError(f"{op.name} with {header.keys} keys and {header.values} values")
    if header.keys and max(map(len, parts[: header.keys])) > LARGEST_KEY:
        raise MalformedError(f"a key of more than {LARGEST_KEY} bytes")
    try:
        names = tuple([str(part, "utf-8") for part in parts[: header.keys]])
    except UnicodeDecodeError:
        raise MalformedError("a key that is not UTF-8") from None
    return Request(op, names, tuple(parts[header.keys :]), header.number)


def split(buffer: bytearray, nbytes: int) -> tuple[bytearray, bytearray]:
    """Return the first `nbytes` of a buffer and the rest, without copying a large buffer that has no rest."""
    if len(buffer) == nbytes:
        return buffer, bytearray()
    first = buffer[:nbytes]
    del buffer[:nbytes]
    return first, buffer


_OPS: dict[int, Op] = {int(op): op for op in Op}


ANY = -1
_SHAPES = dict.fromkeys(Op, (1, 0)) | {  # the numbers of keys and values
    Op.SET: (ANY, ANY),
    Op.GET: (ANY, 0),
    Op.WAIT: (ANY, 0),
    Op.CHECK: (ANY, 0),
    Op.COMPARE_SET: (1, 2),
    Op.APPEND: (1, 1),
    Op.PUSH: (1, 1),
}

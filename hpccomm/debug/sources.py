"""Sources: calls outside hpccomm's groups in which ranks may wait, for the watchdog and the reports."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..core.group import ProcessGroup
    from ..core.hooks import Hook, RemovableHandle
    from .records import Record

LONGEST_TEXT = 60  # characters of a call's source text


class Source(NamedTuple):
    """A library's calls in which ranks wait for each other; each call is a Python frame of a known function."""

    group: ProcessGroup  # its time limit applies to the calls
    codes: Collection[CodeType]  # the functions
    record_of: Callable[[FrameType, str], Record | None]  # of a frame's call, given its line; None if unknown
    in_flight: Callable[..., Iterable[Record]]  # incomplete requests; if any of the given ones is known, only those
    polls: Callable[[], Iterable[Record]]  # receives that the program polls; called once a second
    groups: Callable[[], Mapping[str, dict[str, Any]]]  # entries in reports for sets of ranks, by the key in records
    register_hook: Callable[[Hook], RemovableHandle]  # for hooks that see the calls from now on


SOURCES: list[Source] = []


def named_in(text: str, frame: FrameType) -> list[Any]:
    """Return the objects that a call's source text names, including those in lists; run none of their code.

    Reading a frame's variables keeps their values alive for a while, so use this only for a verdict.
    """
    found: list[Any] = []
    for words in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", text):
        first, *others = words.split(".")
        value: Any = frame.f_locals.get(first, frame.f_globals.get(first))
        for each in others:
            value = _attributes(value).get(each)
        found.extend(value if type(value) in (list, tuple) else [value])
    return [each for each in found if each is not None]


def _attributes(value: object) -> Mapping[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def text_of_call(frame: FrameType) -> str:
    """Return the source text that a frame is executing, ``comm.Barrier()``; "" if there is no source."""
    code = frame.f_code
    line, end, start_column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    if line is None:
        return ""
    lines = [linecache.getline(code.co_filename, number) for number in range(line, (end or line) + 1)]
    if not any(lines):
        return ""
    encoded = [each.encode() for each in lines]  # columns count bytes
    if end_column is not None:
        encoded[-1] = encoded[-1][:end_column]
    if start_column is not None:
        encoded[0] = encoded[0][start_column:]
    text = re.sub(r"\s+", " ", b"".join(encoded).decode(errors="replace")).strip()
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 4]} ..."

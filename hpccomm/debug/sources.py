"""Sources: what else ranks may wait in than operations of hpccomm's groups, for the watchdog and the reports."""

from __future__ import annotations

import linecache
import re
from collections.abc import Collection, Iterable, Mapping
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..core.group import ProcessGroup
    from .records import Record

LONGEST_TEXT = 60  # characters of a call's source text


class Source(Protocol):
    """The calls of a library in which ranks wait for each other; each is a Python frame of a known function."""

    @property
    def group(self) -> ProcessGroup:
        """The group whose time limit holds for them."""

    @property
    def codes(self) -> Collection[CodeType]:
        """The functions."""

    def record_of(self, frame: FrameType, where: str) -> Record | None:
        """Return the record of the call that is in such a frame; None if nothing is known of it."""

    def in_flight(self) -> Iterable[Record]:
        """Return the records of what has begun, and has not ended."""

    def groups(self) -> Mapping[str, dict[str, Any]]:
        """Return what reports say of the sets of ranks that have such calls, by the key in their records."""


SOURCES: list[Source] = []


def text_of_call(frame: FrameType) -> str:
    """Return the source text of what a frame is executing, ``comm.Barrier()``; "" where there is no source."""
    code = frame.f_code
    line, end, start_column, end_column = frame.f_lineno, frame.f_lineno, None, None
    if hasattr(code, "co_positions"):  # Python 3.11
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

"""Descriptions of calls: the calls of two ranks match if and only if their descriptions are equal."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from ...core.arrays import count_of
from ...core.hooks import Operation
from ...core.operation_list import OPERATIONS, START
from ...core.registry import OBJECTS
from ..records import arrays_in
from ..stacks import program_line

LONGEST = 600  # characters of one call
LONGEST_LIST = 100  # characters of a list of sizes


def call_in_words(operation: Operation) -> str:
    """Return ``all_reduce (float32, 1048576 elements, SUM)``."""
    words = _details(operation.name.removesuffix(START).removesuffix("_init"), operation.arguments)
    if operation.async_op:
        words.append("asynchronous")
    if operation.work is not None and operation.work.number:
        words.append(f"set up as number {operation.work.number}")
    transport = operation.group.config.device_map.get(operation.device, "mpi")
    if transport != "mpi" or operation.device not in ("cpu", OBJECTS):
        words.append(f"{operation.device} over {transport}")
    return with_details(operation.name, words)


def array_in_words(array: Any) -> str:
    """Return ``float32, 4 elements``."""
    return f"{_cut(str(array.dtype), LONGEST_LIST)}, {array.size} element{'s' * (array.size != 1)}"


def caller() -> str:
    """Return the program's line that called hpccomm, such as ``train.py:91``."""
    return program_line(sys._getframe(1))


def _details(name: str, arguments: dict[str, Any]) -> list[str]:
    if name == "all_reduce_sparse":
        matrix = arguments["matrix"]
        return [str(matrix.dtype), f"{matrix.shape[0]} x {matrix.shape[1]}"]
    if name == "coalescing":
        return [_block_in_words(arguments["calls"])]
    if name == "empty_shared":
        return [str(arguments["dtype"])]
    if name == "empty_symmetric":
        return [str(arguments["dtype"]), f"shape {tuple(map(int, arguments['shape']))}"]
    if name == "fence":
        return []
    if name.startswith("halo_"):
        dtypes = ", ".join(str(array.dtype) for array in arguments["arrays"])
        return [_cut(dtypes, LONGEST_LIST), f"width {arguments['width']}", *([] if arguments["corners"] else ["faces"])]
    words = []
    spec = OPERATIONS[name]
    if name == "all_to_all_single":
        has_splits = arguments["input_counts"] is not None
        words += [str(arguments["array"].dtype), "split sizes"] if has_splits else [array_in_words(arguments["array"])]
    elif spec.alike:
        words.append(_arrays_in_words(arguments[spec.alike[-1]]))
    elif name in ("gather", "scatter", "all_to_all"):
        array = arguments.get("array", arguments.get("output"))
        words.append(str((arguments["outputs"][0] if array is None else array).dtype))
    if name == "broadcast_object_list":
        words.append(f"{len(arguments['objects'])} objects")
    op = arguments.get("op")
    if op is not None:
        words.append(str(getattr(op, "name", op)))
    if "root" in arguments:
        words.append(f"root {arguments['root']}")
    return words


def _arrays_in_words(arrays: Any) -> str:
    if not isinstance(arrays, list | tuple):
        return array_in_words(arrays)
    same_dtype = groupby(arrays_in(arrays), key=lambda array: str(array.dtype))
    return _cut(
        "; ".join(f"{dtype}: {_times(map(count_of, same))} elements" for dtype, same in same_dtype), LONGEST_LIST
    )


def _times(sizes: Iterable[int]) -> str:
    """Return ``3 x 5, 7`` for 5, 5, 5, 7."""
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    return ", ".join(f"{times} x {size}" if times > 1 else str(size) for size, times in runs)


def _block_in_words(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> str:
    """Describe the calls of a coalescing() block, with ``+`` between calls that are sent together."""

    def described(call: tuple[str, tuple[Any, ...]]) -> tuple[str, dict[str, Any]]:
        return call[0], dict(zip(OPERATIONS[call[0]].arguments, call[1]))

    def kind(call: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
        return call[0], call[1].get("op"), call[1].get("root")

    together = [list(same) for _, same in groupby(map(described, calls), key=kind)]
    return ", ".join(" + ".join(with_details(name, _details(name, named)) for name, named in same) for same in together)


def with_details(name: str, words: Sequence[str]) -> str:
    """Return ``name (words, words)``."""
    return _cut(f"{name} ({', '.join(words)})", LONGEST) if words else name


def _cut(text: str, longest: int) -> str:
    """Cut a text to a length; a hash keeps different texts different."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 40]} ... [{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}]"

"""The files of checkpoints: names, manifests, the dtypes and bytes of arrays, and writing so that it lasts."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..core.arrays import module_of
from .together import CheckpointError, NoCheckpointError

FORMAT = "hpccomm checkpoint 1"
BLOCK = 4 << 20  # bytes that have a checksum of their own: a part of an array can be read and verified alone
MANIFEST = re.compile(r"step-(\d+)\.json")
DATA = re.compile(r"step-(\d+)-[0-9a-f]{8}")
TEMPORARY = ".tmp"


# -- names and manifests -----------------------------------------------------------------------------


def name_of(step: int) -> str:
    """Return what the names of a step's files begin with: in order of the steps in a listing."""
    return f"step-{step:010}"


def manifest_path(folder: Path, step: int) -> Path:
    """Return where the manifest of a step is."""
    return folder / f"{name_of(step)}.json"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a manifest, in ascending order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for found in map(MANIFEST.fullmatch, names) if found)


def sealed(body: dict[str, Any]) -> bytes:
    """Return the manifest as a file: JSON, whose first line has the checksum of the others."""
    rest = json.dumps(body).removeprefix("{").encode()
    return b'{"crc32": "%08x",\n%s\n' % (zlib.crc32(rest), rest)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return what a manifest says, or raise."""
    path = manifest_path(folder, step)
    try:
        first, _, rest = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise NoCheckpointError(f"there is no checkpoint of step {step} in {folder}") from None
    if first != b'{"crc32": "%08x",' % zlib.crc32(rest.removesuffix(b"\n")):
        raise CheckpointError(f"the manifest {path} is damaged: its checksum is wrong")
    body: dict[str, Any] = json.loads(b"{" + rest)
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has the format {body['format']!r}; this version reads {FORMAT!r}")
    return body


def data_of(folder: Path, step: int) -> str | None:
    """Return the name of the folder that has the arrays of a step; None where no manifest says it."""
    try:
        return str(read_manifest(folder, step)["folder"])
    except (CheckpointError, OSError):
        return None


# -- writing -----------------------------------------------------------------------------------------


def write_durably(path: Path, write: Callable[[Any], object]) -> int:
    """Let `write` fill a file that has its name only when all of it is on the disk; return its size in bytes."""
    temporary = f"{path}{TEMPORARY}"
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        nbytes = file.tell()
    os.replace(temporary, path)
    fsync_folder(path.parent)
    return nbytes


def make_folder(path: Path) -> None:
    """Make a folder, with those that it is in, all of them on the disk; other ranks may be doing the same."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# -- arrays as bytes ---------------------------------------------------------------------------------


def stored(view: Any, axis: int) -> Any:
    """Return an array as it is stored: on the host, in C order, with the axis that it is sharded along first.

    So the part that another number of ranks needs is one run of bytes, whatever the axis.
    """
    if module_of(view) is not np:
        from ..cuda.packing import on_the_host  # which needs CuPy

        view = on_the_host(view)
    array = np.asarray(np.moveaxis(view, axis, 0) if axis else view, order="C")
    # .npy has no word for bfloat16 and its like: their bytes are stored as integers
    return array.view(f"u{array.dtype.itemsize}") if _is_of_ml_dtypes(array.dtype) else array


def dtype_as_text(dtype: np.dtype[Any]) -> str:
    """Return what the manifest has for a dtype; ValueError for one that would not come back as it is."""
    if _is_of_ml_dtypes(dtype):
        return dtype.name
    if dtype.hasobject:
        raise ValueError(f"has dtype {dtype}; Python objects are not saved")
    described = np.lib.format.dtype_to_descr(dtype)
    if np.lib.format.descr_to_dtype(described) != dtype:
        raise ValueError(f"has dtype {dtype}, which .npy files can't hold")
    return described if isinstance(described, str) else repr(described)


def dtype_from_text(text: str) -> Any:
    """Return the dtype."""
    if text.startswith("["):
        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    if not text[0].isalpha():
        return np.dtype(text)
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(f"the dtype {text} is one of ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, text))


def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    ml_dtypes = sys.modules.get("ml_dtypes")  # where it is not loaded, there is no such array
    return ml_dtypes is not None and getattr(ml_dtypes, dtype.name, None) is dtype.type


def as_bytes(array: Any) -> Any:
    """View a C-contiguous array as its bytes."""
    return np.empty(0, np.uint8) if array.nbytes == 0 else array.reshape(-1).view(np.uint8)


def blocks(array: Any) -> Iterator[Any]:
    """Yield the bytes of an array in blocks."""
    data = as_bytes(array)
    for begin in range(0, len(data), BLOCK):
        yield data[begin : begin + BLOCK]


def read_rows(path: Path, shard: dict[str, Any], block: int, begin: int, end: int, rows: Any) -> None:
    """Fill `rows` with the rows from `begin` to `end` of what a file has of an array; every byte is verified."""
    target: Any = as_bytes(rows)
    if len(target) == 0:
        return
    row = len(target) // (end - begin)
    first, last, size = begin * row, end * row, shard["length"] * row
    scratch: Any = np.empty(min(block, size), np.uint8)
    with _open(path) as file:
        for number in range(first // block, -(-last // block)):
            start, stop = number * block, min((number + 1) * block, size)
            is_inside = first <= start and stop <= last
            data = target[start - first : stop - first] if is_inside else scratch[: stop - start]
            _read_into(file, shard["offset"] + start, data, path)
            if zlib.crc32(data) != shard["crc32"][number]:
                raise CheckpointError(f"{path} is damaged: a checksum is wrong")
            if not is_inside:
                low, high = max(first, start), min(last, stop)
                target[low - first : high - first] = data[low - start : high - start]


def _open(path: Path) -> Any:
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, or the folder is not on a file system that all ranks share"
        ) from None


def _read_into(file: Any, position: int, data: Any, path: Path) -> None:
    file.seek(position)
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise CheckpointError(f"{path} is damaged: it ends after {position + done} bytes, too early")
        done += count

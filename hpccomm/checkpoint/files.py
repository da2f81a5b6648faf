"""Files of checkpoints: names, manifests, dtypes and bytes of arrays, and durable writes."""

from __future__ import annotations

import ast
import errno
import functools
import json
import math
import os
import re
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..core.arrays import module_of
from ..core.late import ON_THE_HOST, late
from ..errors import CheckpointWarning, on_rank
from .together import CheckpointError, DamagedError, NoCheckpointError

T = TypeVar("T")

FORMAT = "hpccomm checkpoint 1"
BLOCK = 4 << 20  # bytes per checksum: a part of an array can be read and verified alone
LARGE = 1 << 20  # bytes: a block of this size or more goes to the disk at once, while others follow
_STEP = r"step-(\d{10}|[1-9]\d{10,})"  # the form that `name_of` writes: a file step-7 is not ours
MANIFEST = re.compile(rf"{_STEP}\.json", re.ASCII)
DATA = re.compile(rf"{_STEP}-[0-9a-f]{{8}}", re.ASCII)
UNFINISHED = re.compile(rf"{_STEP}\.json\.[0-9a-f]{{8}}\.tmp", re.ASCII)
OF_A_RANK = re.compile(r"rank-(\d+)\.npy", re.ASCII)
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # of a file server that is briefly away
PAUSES = (0.1, 1.0, 3.0)  # seconds between the attempts


# -- names and manifests -----------------------------------------------------------------------------


def name_of(step: int) -> str:
    """Return the file name prefix of a step; names sort by step."""
    return f"step-{step:010}"


def rank_of(file: str) -> int:
    """Return the rank of a file, from its name in a manifest."""
    found = OF_A_RANK.fullmatch(file)
    assert found is not None
    return int(found[1])


def manifest_path(folder: Path, step: int) -> Path:
    """Return the path of a step's manifest."""
    return folder / f"{name_of(step)}.json"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a manifest, in ascending order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for found in map(MANIFEST.fullmatch, names) if found)


def sealed(body: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest: JSON; the first line has the checksum of the others."""
    rest = json.dumps(body).removeprefix("{").encode()
    return b'{"crc32": "%08x",\n%s\n' % (zlib.crc32(rest), rest)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return the verified content of a manifest; CheckpointError if it is damaged, or not written by `save`."""
    path = manifest_path(folder, step)
    try:
        first, _, rest = patiently(path.read_bytes).partition(b"\n")
    except FileNotFoundError:
        raise NoCheckpointError(f"there is no checkpoint of step {step} in {folder}") from None
    if first != b'{"crc32": "%08x",' % zlib.crc32(rest.removesuffix(b"\n")):
        raise DamagedError(f"the manifest {path} is damaged: its checksum is wrong")
    try:
        body: dict[str, Any] = json.loads(b"{" + rest)
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path} has the format {body['format']!r}; this version reads {FORMAT!r}")
        _check(body, step)
    except CheckpointError:
        raise
    except Exception as error:  # written by another program, with a valid checksum
        raise DamagedError(f"the manifest {path} is damaged: {type(error).__name__}: {error}") from None
    return body


def _check(body: dict[str, Any], step: int) -> None:
    """Raise if a manifest is inconsistent, or names files of another step."""

    def require(is_so: object, what: object) -> None:
        if not is_so:
            raise ValueError(f"unexpected {what!r}")

    def number(value: Any, least: int = 0) -> int:
        require(type(value) is int and value >= least, value)
        return int(value)

    require(body["step"] == step, body["step"])
    require((found := DATA.fullmatch(body["folder"])) and int(found[1]) == step, body["folder"])
    require(isinstance(body["metadata"], dict), body["metadata"])
    require(isinstance(body.get("writer", {}), dict), body.get("writer"))
    number(body["ranks"], 1)
    block = number(body["block"], 1)
    for kind in ("arrays", "replicated"):
        for described in body[kind].values():
            dtype, shape, axis = dtype_from_text(described["dtype"]), described["shape"], described.get("axis", 0)
            require(not dtype.hasobject, described["dtype"])
            lengths = [number(shard["length"]) for shard in described["shards"]]
            require(kind == "arrays" or len(lengths) == 1, described["shards"])
            whole = shape or [1]  # a 0-d array is one row
            require(sum(lengths) == whole[number(axis)], shape)
            for length in whole:
                number(length)
            row = row_bytes(described)
            for shard in described["shards"]:
                require(OF_A_RANK.fullmatch(shard["file"]), shard["file"])
                number(shard["offset"])
                require(len(shard["crc32"]) == -(-shard["length"] * row // block), shard["crc32"][:9])


def row_bytes(described: dict[str, Any]) -> int:
    """Return the bytes of one row of a stored array, with the sharded axis first."""
    axis, shape = described.get("axis", 0), described["shape"]
    nbytes: int = dtype_from_text(described["dtype"]).itemsize
    return nbytes * int(math.prod((*shape[:axis], *shape[axis + 1 :])))


def shards_of_files(body: dict[str, Any]) -> dict[str, list[tuple[dict[str, Any], int]]]:
    """Return each file that a manifest names, with its shards and their bytes, in the order of their offsets."""
    found: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for kind in ("arrays", "replicated"):
        for described in body[kind].values():
            row = row_bytes(described)
            for shard in described["shards"]:
                found.setdefault(shard["file"], []).append((shard, shard["length"] * row))
    return {file: sorted(shards, key=lambda each: each[0]["offset"]) for file, shards in found.items()}


def sizes_of_files(body: dict[str, Any]) -> dict[str, int]:
    """Return the files that a manifest names, with their sizes in bytes."""
    return {
        file: max(shard["offset"] + nbytes for shard, nbytes in shards)
        for file, shards in shards_of_files(body).items()
    }


def data_of(folder: Path, step: int) -> str | None:
    """Return the name of the folder with a step's arrays, from its manifest, or None."""
    try:
        return str(read_manifest(folder, step)["folder"])
    except (CheckpointError, OSError):
        return None


def patiently(read: Callable[[], T]) -> T:
    """Return the result of `read`; retry after temporary failures of the file system.

    DamagedError if the disk can't read a block; other errors may pass.
    """
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            time.sleep(pause)
    try:
        return read()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedError(str(error)) from error


# -- writing -----------------------------------------------------------------------------------------


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def contents_of(path: Path) -> Callable[[Any], None]:
    """Return a function for `write_durably` that writes the contents of the file `path`."""

    def write(out: Any) -> None:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                write_block(out, block)

    return write


def write_durably(path: Path, write: Callable[[Any], object], undo: Callable[[], object] = lambda: None) -> int:
    """Write a file by calling `write`, flush it, and rename it to `path`; return its size in bytes.

    After an error, call `undo` if the file certainly does not have that name.
    """
    temporary = temporary_of(path)
    may_be_there = False
    try:
        with create(temporary) as file:
            write(file)
            flush(file)
            nbytes: int = file.tell()
        may_be_there = True
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException as error:
        if isinstance(error, OSError):  # a write, for example on a full disk, names no file
            error.filename = error.filename or str(path)
        with suppress(OSError):
            os.unlink(temporary)
            may_be_there = False  # it still had its old name
        if not may_be_there:
            undo()
        raise
    return nbytes


def temporary_of(path: Path) -> Path:
    """Return a unique name in the same folder."""
    return Path(f"{path}.{os.urandom(4).hex()}.tmp")


def create(path: Path) -> Any:
    """Create a file and open it for writing; never follow a link that another user has put there."""
    return open(path, "xb")  # O_EXCL


def write_block(file: Any, block: Any) -> None:
    """Write a block; the system starts to bring it to the disk while the next block is prepared."""
    file.write(block)
    if len(block) < LARGE or not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):  # file systems without this advice; pages that are still dirty stay in memory
        os.posix_fadvise(file.fileno(), file.tell() - len(block), len(block), os.POSIX_FADV_DONTNEED)


def flush(file: Any) -> None:
    """Bring the written data to the disk."""
    file.flush()
    os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably; other ranks may be doing the same."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:  # the folder may be writable, but not listable
        _warn_of(path, str(error))
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # file systems that can't, and need not: CIFS, some FUSE
            error.filename = error.filename or str(path)
            raise
    finally:
        os.close(number)


@functools.cache
def _warn_of(path: Path, why: str) -> None:
    """Warn once about a folder whose entries can't be flushed."""
    warnings.warn(
        f"checkpoint.save: the names in {path} can't be brought to the disk ({why}): if its node fails in the next "
        f"seconds, the new folder in it may be gone{on_rank()}",
        CheckpointWarning,
        stacklevel=2,
    )


# -- arrays as bytes ---------------------------------------------------------------------------------


def stored(view: Any) -> Any:
    """Return an array as it is stored: on the host, in C order."""
    if module_of(view) is not np:
        view = late(ON_THE_HOST)(view)
    array = without_padding(np.asarray(view, order="C"))
    if not is_of_ml_dtypes(array.dtype):
        return array
    # .npy can't describe bfloat16 and similar dtypes: their bytes are stored as integers
    return array.astype(array.dtype.newbyteorder("="), copy=False).view(f"u{array.dtype.itemsize}")


def without_padding(array: Any) -> Any:
    """Return an array with zeros in its padding bytes, which NumPy leaves undefined."""
    dtype = array.dtype
    if not _has_padding(dtype):
        return array
    clean = np.zeros(array.shape, dtype)
    for name in dtype.names or ():
        clean[name] = without_padding(array[name])
    if dtype.names is None:
        used = slice(10) if dtype.isnative else slice(-10, None)  # of 12 or 16; a complex number has two of them
        rows = (-1, np.dtype(np.longdouble).itemsize)
        as_bytes(clean).reshape(rows)[:, used] = as_bytes(np.ascontiguousarray(array)).reshape(rows)[:, used]
    return clean


def _has_padding(dtype: Any) -> bool:
    if dtype.names is None:
        base = dtype.base
        return _has_padding(base) if base.names else base.char in "gG" and bool(np.finfo(base).nmant == 63)  # x87
    fields = [dtype.fields[name][0] for name in dtype.names]
    return sum(field.itemsize for field in fields) != dtype.itemsize or any(map(_has_padding, fields))


def dtype_as_text(dtype: np.dtype[Any]) -> str:
    """Return a dtype as text for a manifest; ValueError if it could not be read back."""
    if is_of_ml_dtypes(dtype):
        return dtype.name
    if dtype.hasobject:
        raise ValueError(f"has dtype {dtype}; Python objects are not saved")
    described = np.lib.format.dtype_to_descr(dtype)
    if np.lib.format.descr_to_dtype(described) != dtype:
        raise ValueError(f"has dtype {dtype}, which .npy files can't hold")
    return described if isinstance(described, str) else repr(described)


def dtype_from_text(text: str) -> Any:
    """Return the dtype of a text from a manifest."""
    if text.startswith("["):
        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    if not text[0].isalpha():
        return np.dtype(text)
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(f"the dtype {text} is one of ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, text))


def is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    """Return True for bfloat16 and similar dtypes, which NumPy and .npy don't know."""
    ml_dtypes = sys.modules.get("ml_dtypes")  # not loaded: no array has such a dtype
    return ml_dtypes is not None and getattr(ml_dtypes, dtype.name, None) is dtype.type


def as_bytes(array: Any) -> Any:
    """Return a view of a C-contiguous array as bytes."""
    return np.empty(0, np.uint8) if array.nbytes == 0 else array.reshape(-1).view(np.uint8)


def blocks(array: Any) -> Iterator[Any]:
    """Yield the bytes of an array in blocks."""
    data = as_bytes(array)
    for begin in range(0, len(data), BLOCK):
        yield data[begin : begin + BLOCK]


def read_bytes(path: Path, shard: dict[str, Any], size: int, block: int, first: int, target: Any) -> None:
    """Fill `target` with the bytes of a shard (of `size` bytes) from `first` on, and verify all of them."""
    last = first + len(target)
    scratch: Any = np.empty(min(block, size), np.uint8)
    with open_unbuffered(path) as file:
        for number in range(first // block, -(-last // block)):
            start, stop = number * block, min((number + 1) * block, size)
            is_inside = first <= start and stop <= last
            data = target[start - first : stop - first] if is_inside else scratch[: stop - start]
            read_at(file, shard["offset"] + start, data, path)
            if zlib.crc32(data) != shard["crc32"][number]:
                raise DamagedError(f"{path} is damaged: a checksum is wrong")
            if not is_inside:
                low, high = max(first, start), min(last, stop)
                target[low - first : high - first] = data[low - start : high - start]


def verify_file(path: Path, shards: Iterable[tuple[dict[str, Any], int]], block: int) -> None:
    """Read the shards of a file, given with their bytes; CheckpointError if a checksum is wrong."""
    with open_unbuffered(path) as file:
        for shard, nbytes in shards:
            data: Any = np.empty(min(block, nbytes), np.uint8)
            for number, crc32 in enumerate(shard["crc32"]):
                part = data[: nbytes - number * block]
                read_at(file, shard["offset"] + number * block, part, path)
                if zlib.crc32(part) != crc32:
                    raise DamagedError(f"{path} is damaged: a checksum is wrong")


def open_unbuffered(path: Path) -> Any:
    """Open a file for reading; CheckpointError if it is missing."""
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing, or the folder is not on a file system that all ranks share") from None


def read_at(file: Any, position: int, data: Any, path: Path) -> None:
    """Fill `data` with the bytes of a file from `position` on; CheckpointError if the file ends too early."""
    file.seek(position)
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise DamagedError(f"{path} is damaged: it ends after {position + done} bytes, too early")
        done += count

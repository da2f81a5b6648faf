"""Export a checkpoint to an HDF5 file or a zarr folder, with the global arrays under their names."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..process.stderr import progress
from . import files
from .parts import PathOf, length_of, read_part
from .together import CheckpointError

PIECE = 64 << 20  # bytes of an array in memory at a time, or one row if that is larger
CHUNK = 8 << 20  # bytes of a chunk of zarr at most


def export(body: dict[str, Any], path_of: PathOf, target: Path) -> None:
    """Write the arrays of a manifest to `target`, in the format of its suffix; CheckpointError if that is impossible.

    `target` appears when it is complete.
    """
    write = FORMATS.get(target.suffix)
    if write is None:
        raise CheckpointError(f"{target} has none of the endings {', '.join(FORMATS)}, which say the format")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already; remove it, or choose another name")
    arrays = {**body["arrays"], **body["replicated"]}
    _check_names(arrays)
    unfinished = target.with_name(f"{target.stem}.{os.urandom(4).hex()}.tmp{target.suffix}")
    try:
        with write(unfinished, {name: body[name] for name in ("step", "ranks", "metadata")}) as create:
            # create all first: this finds data that the format can't hold before hours of copying
            outputs = {name: create(name, described) for name, described in arrays.items()}
            for name, put in progress(outputs.items(), "exported arrays"):
                _copy(body["block"], path_of, arrays[name], put)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _facts_of_array(described: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of one array; those of a sharded array also describe its shards."""
    facts = {"dtype": described["dtype"]}
    if "axis" in described:
        facts |= {"axis": described["axis"], "lengths": [shard["length"] for shard in described["shards"]]}
    return facts


def _check_names(names: dict[str, Any]) -> None:
    """Raise if a name is no array's path: in both formats "/" separates groups, like folders."""
    for name in names:
        parts = name.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if {"", ".", "..", "zarr.json"} & set(parts) or "\0" in name:
            raise CheckpointError(f"the name {name!r} of an array is no path in a file of zarr or HDF5")
        if found := above & names.keys():
            raise CheckpointError(f"{min(found)!r} can't be an array and the group of the array {name!r}")


def _copy(block: int, path_of: PathOf, described: dict[str, Any], put: Callable[[Any, Any], None]) -> None:
    """Copy an array piece by piece, along its sharded axis."""
    axis, length = described.get("axis", 0), length_of(described)
    row = max(1, files.row_bytes(described))
    count = max(1, PIECE // row)
    if rows_of_chunk := _chunks(described)[axis : axis + 1]:  # a chunk in two pieces is written twice
        count = max(1, count // rows_of_chunk[0]) * rows_of_chunk[0]
    for begin in range(0, length, count):
        end = min(begin + count, length)
        where = (*[slice(None)] * axis, slice(begin, end)) if described["shape"] else ()
        put(where, read_part(path_of, block, described, begin, end))


def _chunks(described: dict[str, Any]) -> tuple[int, ...]:
    """Return a chunk shape of some MiB: as many rows of the sharded axis as fit, or part of one row."""
    axis, shape = described.get("axis", 0), [max(1, length) for length in described["shape"]]
    itemsize = files.dtype_from_text(described["dtype"]).itemsize
    for each in (axis, *(other for other in range(len(shape)) if other != axis)):
        while shape and shape[each] > 1 and math.prod(shape) * itemsize > CHUNK:
            shape[each] = -(-shape[each] // 2)
    return tuple(shape)


# -- formats: each yields a function that creates an array and returns a function that writes part of it -----------

Create = Callable[[str, "dict[str, Any]"], Callable[[Any, Any], None]]


@contextmanager
def _hdf5(path: Path, facts: dict[str, Any]) -> Iterator[Create]:
    h5py = _library("h5py", ".zarr")
    # HDF5 1.8 (2008) and later: attributes may exceed 64 KiB
    with h5py.File(path, "x", libver=("v108", "latest")) as file:
        file.attrs.update({**facts, "metadata": json.dumps(facts["metadata"])})

        def create(name: str, described: dict[str, Any]) -> Callable[[Any, Any], None]:
            given = files.dtype_from_text(described["dtype"])
            dtype = _standard(given)
            if given.kind == "U":
                dtype = h5py.string_dtype()
            elif given.kind in "mM":
                dtype = np.dtype(np.int64).newbyteorder(given.byteorder)
            with _refused(name, given, ".zarr"):
                dataset = file.create_dataset(name, shape=described["shape"], dtype=dtype)
            dataset.attrs.update(_facts_of_array(described))

            def put(where: Any, part: Any) -> None:
                if given.kind in "mM":
                    dataset[where] = part.view(dtype)
                else:
                    dataset[where] = part.astype(object if given.kind == "U" else dtype, copy=False)

            return put

        yield create


@contextmanager
def _zarr(path: Path, facts: dict[str, Any]) -> Iterator[Create]:
    zarr = _library("zarr", ".h5")
    root = zarr.open_group(str(path), mode="w-")
    root.attrs.update(facts)

    def create(name: str, described: dict[str, Any]) -> Callable[[Any, Any], None]:
        given = files.dtype_from_text(described["dtype"])
        dtype = str if given.kind == "U" else _standard(given)
        make = root.create_array if hasattr(root, "create_array") else root.create_dataset  # zarr 3, zarr 2
        with _refused(name, given, ".h5"):
            if given.char in "gG":  # zarr 2 writes it, but zarr 3 can't read it
                raise TypeError("zarr has no numbers of this precision")
            array = make(name, shape=tuple(described["shape"]), dtype=dtype, chunks=_chunks(described))
        array.attrs.update(_facts_of_array(described))

        def put(where: Any, part: Any) -> None:
            with _refused(name, given, ".h5"):
                array[where] = part if given.kind == "U" else part.astype(dtype, copy=False)

        return put

    yield create


FORMATS = {".zarr": _zarr, ".h5": _hdf5, ".hdf5": _hdf5}


def _library(name: str, other: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"{error}; pip install {name}, or choose a name that ends in {other}") from None


@contextmanager
def _refused(name: str, dtype: Any, other: str) -> Iterator[None]:
    """Translate a library's error; the message names the array and the other format."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name!r} has dtype {dtype}: {error}; choose a name that ends in {other}") from None


def _standard(dtype: Any) -> Any:
    """Return the NumPy dtype that holds all values of `dtype`, which may be from ml_dtypes."""
    if not files.is_of_ml_dtypes(dtype):
        return dtype
    wider = (np.uint8, np.int8, np.float32)
    return np.dtype(next((each for each in wider if np.can_cast(dtype, each)), np.complex64))

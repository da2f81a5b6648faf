"""Saving: the files of all ranks, then the manifest, then the removal of older checkpoints."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..core import checks
from ..core.arrays import Array, locate, module_of
from ..core.group import ProcessGroup
from ..core.wakes import Event
from ..errors import on_rank
from . import files
from .destination import Destination, file_of
from .levels import Levels
from .together import Attempt, CheckpointError, Steps, agreed, at_once, attempt, together
from .writer import writer

T = TypeVar("T")
Views = dict[str, dict[str, Any]]  # "arrays" and "replicated": each array, with its sharded axis first


@dataclass
class Saving:
    """One checkpoint, as one rank saves it: `begin`, `write`, `end`.

    Every rank of the group calls `begin`, and takes the steps of `end`. `write` only writes this rank's file: any
    thread may call it.

    If there are `levels`, files go to the nodes' folders, and now and then from there to `where`.
    """

    operation: str
    group: ProcessGroup
    where: Destination
    step: Any
    given: dict[str, Mapping[str, Array]]  # "arrays" and "replicated"
    axis: int | Mapping[str, int]
    keep_memory: Any = None  # limit in bytes for memory that stays allocated for copies
    levels: Levels | None = None
    views: Views = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)  # the description of the first rank's arguments
    written: Attempt = field(init=False)
    drained: Attempt = field(init=False)  # with `levels`, if this save goes to the shared folder, too
    is_written: Event = field(default_factory=Event)

    def run(self, metadata: Any, keep: Any, overwrite: bool) -> list[str]:
        """Write the checkpoint while the program waits; return warnings."""
        try:
            self.begin(metadata, keep, overwrite)
            self.write()
            return at_once(self.group, self.end())
        finally:
            self.release()

    def release(self) -> None:
        """Release the folders' locks."""
        for each in self._folders():
            each.release()

    def begin(self, metadata: Any, keep: Any, overwrite: bool, copy: Callable[[], object] = lambda: None) -> None:
        """Compare the ranks' arguments, and lock the folders; every rank calls `copy` meanwhile."""
        every = together(self.group, self.operation, lambda: self._describe(metadata, keep, overwrite))
        _compare(self.operation, self.group, every)
        self.first = every[0]
        if self.levels is not None:
            self.levels.begin(self.operation, self.group, [each["local"] for each in every])
        folders = self._folders()
        for each in folders:
            each.name(self.step, self.first["token"])

        def take() -> None:
            for each in filter(self._leads, folders):
                each.take(overwrite)
            copy()

        together(self.group, self.operation, take)

    def write(self) -> None:
        """Write this rank's file; `end` reports the outcome, also an error, in its first step."""
        self.written = attempt(self.operation, self._write)
        if self.levels is not None and self.levels.is_drained and self.written.error is None:
            self.drained = attempt(self.operation, self._drain)
        self.is_written.set()

    def end(self) -> Steps[list[str]]:
        """Complete the checkpoint in steps; each step starts when all ranks have succeeded in the one before.

        Return warnings.
        """
        try:
            return (yield from self._end())
        finally:
            self.release()

    def _end(self) -> Steps[list[str]]:
        first = self._folders()[0]
        written = yield from agreed(self.group, self.operation, self.written, self._undo)
        if self.levels is not None:
            sizes = [each["nbytes"] for each in written]
            yield from self.levels.copy(self.group, self.operation, sizes, self._manifest(first, written), self._undo)
        warnings = yield from self._complete(first, written, self._undo)
        if self.levels is not None:
            warnings = self.levels.warnings + warnings
            if self.levels.is_drained:
                undo = partial(self.where.undo, self.group.rank)
                yield from agreed(self.group, self.operation, self.drained, undo)
                warnings += yield from self._complete(self.where, written, undo)
        return warnings

    def _complete(
        self, where: Destination, written: list[dict[str, Any]], undo: Callable[[], None]
    ) -> Steps[list[str]]:
        """Publish the written files at a destination, and remove older ones there; return warnings."""
        yield from self._agreed(lambda: self._verify(where, written), undo)
        # No rank removes its file from here on: the manifest may exist, even if this rank sees an error.
        yield from self._agreed(lambda: self._publish(where, written))
        return self._prune(where) if self._leads(where) else []

    def _undo(self) -> None:
        for each in self._folders():
            each.undo(self.group.rank)

    def _leads(self, where: Destination) -> bool:
        return self.group.rank == where.leader

    def _folders(self) -> list[Destination]:
        """Return the folders that this save locks; the files go to the first one first."""
        return [self.where] if self.levels is None else [self.levels.local, self.where]

    def _agreed(self, act: Callable[[], T], undo: Callable[[], None] = lambda: None) -> Steps[list[T]]:
        return agreed(self.group, self.operation, attempt(self.operation, act), undo)

    # -- the arguments ---------------------------------------------------------------------------

    def _describe(self, metadata: Any, keep: Any, overwrite: bool) -> dict[str, Any]:
        """Check this rank's arguments, and return their description for all ranks."""
        self.step = checks.integer("step", self.step)
        if self.step < 0:
            raise ValueError(f"step is {self.step}; expected 0 or more")
        keep = None if keep is None else checks.integer("keep", keep)
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; expected 1 or more, or None for all")
        if self.keep_memory is not None and checks.integer("keep_memory", self.keep_memory) < 0:
            raise ValueError(f"keep_memory is {self.keep_memory} bytes; expected 0 or more, or None for all")
        metadata = {} if metadata is None else metadata
        for argument, value in {**self.given, "metadata": metadata}.items():
            if not isinstance(value, Mapping):
                raise TypeError(f"{argument} is a {type(value).__name__}; expected a dict, such as {{'x': x}}")
        arrays, replicated = self.given.values()
        if twice := arrays.keys() & replicated.keys():
            raise ValueError(f"{min(twice)!r} is both in arrays and in replicated")
        if isinstance(self.axis, Mapping) and (unknown := self.axis.keys() - arrays.keys()):
            raise ValueError(f"axis has {min(unknown)!r}, which is not in arrays")
        described: dict[str, Any] = {"step": self.step, "keep": keep, "overwrite": bool(overwrite)}
        described["local"] = None if self.levels is None else self.levels.describe(self.group.rank, self.where.folder)
        for kind, given in self.given.items():
            self.views[kind] = {}
            described[kind] = {name: self._describe_array(kind, name, array) for name, array in given.items()}
        if self.group.rank == 0:
            try:
                described["metadata"] = json.loads(json.dumps(_for_json("metadata", dict(metadata))))
            except (ValueError, RecursionError) as error:
                raise TypeError(f"metadata: {error}") from None
            described["token"] = os.urandom(4).hex()
        for each in filter(self._leads, self._folders()):
            each.refuse_later_steps(self.step, overwrite)
        return described

    def _describe_array(self, kind: str, name: Any, array: Array) -> dict[str, Any]:
        if not isinstance(name, str):
            raise TypeError(f"a name in {kind} is {name!r}; expected a str")
        if array is None or isinstance(array, int | float | str | Mapping):
            raise TypeError(
                f"{kind}[{name!r}] is a {type(array).__name__}; expected an array: numbers and text go into metadata, "
                "and each array of a nested dict needs a name, such as 'model.weight'"
            )
        device, view = locate(self.operation, f"{kind}[{name!r}]", array)
        if device not in ("cpu", "cuda", "rocm"):
            raise TypeError(f"{kind}[{name!r}] is on {device!r}; copy it to the host first")
        try:
            described = {"dtype": files.dtype_as_text(view.dtype), "shape": list(view.shape)}
        except ValueError as error:
            raise TypeError(f"{kind}[{name!r}] {error}") from None
        if kind == "arrays":
            axis = self.axis.get(name, 0) if isinstance(self.axis, Mapping) else self.axis
            axis = checks.integer("axis", axis)
            if view.ndim == 0:
                raise ValueError(f"arrays[{name!r}] is 0-d, and has no axis to be sharded along; pass it in replicated")
            if not -view.ndim <= axis < view.ndim:
                raise ValueError(f"axis is {axis}, but arrays[{name!r}] has {view.ndim} dimension(s)")
            described["axis"] = axis = axis % view.ndim
            if axis:  # it is stored first: then the part of each rank is contiguous
                view = module_of(view).moveaxis(view, axis, 0)
        self.views[kind][name] = view
        return described

    # -- the file of this rank -------------------------------------------------------------------

    def _write(self) -> dict[str, Any]:
        """Write this rank's file; return the shards in it, and the checksums of arrays that another rank writes."""
        shards: dict[str, dict[str, Any]] = {"arrays": {}, "replicated": {}}
        writes_all = self.group.rank == 0
        name_of_file = file_of(self.group.rank)

        def write(out: Any) -> None:
            for kind, views in self.views.items():
                for name in self.first[kind]:
                    array = files.stored(views[name])
                    is_written = out is not None and (writes_all or kind == "arrays")
                    shard = shards[kind][name] = {"crc32": []}
                    if is_written:
                        np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
                        length = array.shape[0] if array.ndim else 1
                        shard.update(file=name_of_file, offset=out.tell(), length=length)
                    for block in files.blocks(array):
                        shard["crc32"].append(zlib.crc32(block))
                        if is_written:
                            files.write_block(out, block)

        if writes_all or self.first["arrays"]:
            return {"nbytes": self._folders()[0].write(self.group.rank, write), "shards": shards}
        write(None)
        return {"nbytes": None, "shards": shards}

    def _drain(self) -> None:
        """Copy this rank's file from its node to the shared folder."""
        path = self._folders()[0].data / file_of(self.group.rank)
        if not path.exists():
            return
        try:
            self.where.write(self.group.rank, files.contents_of(path))
        except OSError as error:
            raise CheckpointError(f"{error}; step {self.step} is complete on the nodes, but not there") from error

    # -- when all files are written --------------------------------------------------------------

    def _verify(self, where: Destination, written: list[dict[str, Any]]) -> None:
        """Check that replicated arrays are the same on all ranks, and that the leader sees all files."""
        if self.group.rank == 0:
            self._compare_replicated(written)
        if self._leads(where):
            where.see_all(self.group.ranks, [each["nbytes"] for each in written])

    def _compare_replicated(self, written: list[dict[str, Any]]) -> None:
        for name in self.first["replicated"]:
            sums = [each["shards"]["replicated"][name]["crc32"] for each in written]
            others = [self.group.ranks[rank] for rank, each in enumerate(sums) if each != sums[0]]
            if others:
                raise ValueError(
                    f"replicated[{name!r}] is not the same on rank {others[0]} as on rank {self.group.ranks[0]}; "
                    f"broadcast it first, or pass it in arrays"
                )

    def _publish(self, where: Destination, written: list[dict[str, Any]]) -> None:
        """Write the manifest."""
        if self._leads(where):
            where.publish(self._manifest(where, written), lambda: self._verify(where, written))

    def _manifest(self, where: Destination, written: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "format": files.FORMAT,
            "step": self.step,
            "ranks": self.group.size,
            "writer": writer(),
            "folder": where.data.name,
            "block": files.BLOCK,
            "metadata": self.first["metadata"],
            "arrays": {},
            "replicated": {},
        }
        if self.levels is not None and where is self.levels.local:
            body["local"] = self.levels.local.described([each["nbytes"] for each in written])
        for name, described in self.first["arrays"].items():
            shape, axis = [*described["shape"]], described["axis"]
            shards = [each["shards"]["arrays"][name] for each in written]
            shape[axis] = sum(shard["length"] for shard in shards)
            body["arrays"][name] = {**described, "shape": shape, "shards": shards}
        for name, described in self.first["replicated"].items():
            body["replicated"][name] = {**described, "shards": [written[0]["shards"]["replicated"][name]]}
        return body

    def _prune(self, where: Destination) -> list[str]:
        """Remove the steps that are no longer kept; return a warning if some files can't be removed."""
        left = where.prune(self.first["keep"], self.first["overwrite"])
        if not left:
            return []
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        return [
            f"checkpoint.save: step {self.step} is saved, but older files can't be removed: {left[0]}{more}{on_rank()}"
        ]


def _compare(operation: str, group: ProcessGroup, every: list[dict[str, Any]]) -> None:
    """Raise, on every rank, if the ranks' arguments differ."""

    def same(what: str, values: list[Any]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"{operation}: {what} is {value} on rank {group.ranks[rank]}, and {values[0]} on rank "
                    f"{group.ranks[0]}{on_rank()}"
                )

    for what in ("step", "keep", "overwrite"):
        same(what, [each[what] for each in every])
    same("local", ["None" if each["local"] is None else "a folder" for each in every])
    for what in ("partner", "flush_every") if every[0]["local"] else ():
        same(what, [each["local"][what] for each in every])
    for kind in ("arrays", "replicated"):
        same(f"the list of names in {kind}", [sorted(each[kind]) for each in every])
        for name, first in every[0][kind].items():
            for what in ("dtype", "axis"):
                same(f"the {what} of {kind}[{name!r}]", [each[kind][name].get(what) for each in every])
            shapes = [list(each[kind][name]["shape"]) for each in every]
            if kind == "arrays":
                for shape in shapes:
                    shape[first["axis"] : first["axis"] + 1] = ["any length"]
            same(f"the shape of {kind}[{name!r}]", [f"({', '.join(map(str, shape))})" for shape in shapes])


def _for_json(name: str, value: Any) -> Any:
    """Return a value for JSON, with Python numbers instead of NumPy's; messages call the entry `name`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        entries = {key.item() if isinstance(key, np.generic) else key: each for key, each in value.items()}
        wrong = next((key for key in entries if key is not None and not isinstance(key, str | int | float)), None)
        if wrong is not None:
            raise TypeError(f"{name} has the key {wrong!r}; expected text or a number: str({wrong!r})")
        if len(json.loads(json.dumps(dict.fromkeys(entries)))) < len(entries):
            raise TypeError(f"{name} has two keys that are the same text in JSON, such as 1 and '1'; rename one")
        return {key: _for_json(f"{name}[{key!r}]", each) for key, each in entries.items()}
    if isinstance(value, list | tuple):
        return [_for_json(f"{name}[{i}]", each) for i, each in enumerate(value)]
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which JSON can't hold; expected text, numbers, None, lists and "
            f"dicts: an array can be given in arrays, or as {name}.tolist()"
        )
    return value

"""Saving: the files of all ranks, then the manifest, then the removal of older checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..core import checks
from ..core.arrays import Array, locate
from ..core.group import ProcessGroup
from ..errors import here
from . import files
from .pruning import prune
from .skipped import SkippedSteps
from .together import CheckpointError, together
from .writer import WriterLock, in_words, writer

T = TypeVar("T")


@dataclass
class Saving:
    """One call of `save` on one rank."""

    group: ProcessGroup
    folder: Path
    step: Any
    given: dict[str, Mapping[str, Array]]  # "arrays" and "replicated"
    axis: int | Mapping[str, int]
    data: Path = Path()
    lock: WriterLock | None = None  # the first rank's
    last_published: float = 0.0

    def run(self, metadata: Any, keep: Any, overwrite: bool) -> None:
        """Write the checkpoint, in five steps; each begins when all ranks have succeeded in the one before."""
        every = self._together(lambda: self._describe(metadata, keep, overwrite))
        _compare(self.group, every)
        first = every[0]
        self.data = self.folder / f"{files.name_of(self.step)}-{first['token']}"
        try:
            self._together(lambda: self._begin(overwrite))
            written = self._together(lambda: self._write(first), self._undo)
            self._together(lambda: self._verify(first, written), self._undo)
            # From here on no rank removes its file: the manifest may be there, even if this rank sees an error.
            self._together(lambda: self._publish(first, written))
            if self.lock is not None:
                self._prune(keep, overwrite)
        finally:
            if self.lock is not None:
                self.lock.release()

    def _together(self, act: Callable[[], T], undo: Callable[[], None] | None = None) -> list[T]:
        return together(self.group, "checkpoint.save", act, undo)

    def _describe(self, metadata: Any, keep: Any, overwrite: bool) -> dict[str, Any]:
        """Check this rank's arguments, and return their description for all ranks."""
        self.step = checks.integer("step", self.step)
        if self.step < 0:
            raise ValueError(f"step is {self.step}; expected 0 or more")
        if keep is not None and checks.integer("keep", keep) < 1:
            raise ValueError(f"keep is {keep}; expected 1 or more, or None for all")
        arrays, replicated = self.given.values()
        if twice := arrays.keys() & replicated.keys():
            raise ValueError(f"{min(twice)!r} is both in arrays and in replicated")
        if isinstance(self.axis, Mapping) and (unknown := self.axis.keys() - arrays.keys()):
            raise ValueError(f"axis has {min(unknown)!r}, which is not in arrays")
        described: dict[str, Any] = {"step": self.step, "keep": keep, "overwrite": bool(overwrite)}
        for kind, given in self.given.items():
            described[kind] = {name: self._describe_array(kind, name, array) for name, array in given.items()}
        if self.group.rank == 0:
            try:
                described["metadata"] = json.loads(json.dumps(dict(metadata or {})))
            except (TypeError, ValueError) as error:
                raise TypeError(f"metadata: {error}") from None
            described["token"] = os.urandom(4).hex()
            self._refuse_later_steps(overwrite)
        return described

    def _refuse_later_steps(self, overwrite: bool) -> None:
        """Raise if the folder has a later step, unless it will be removed, or was skipped as damaged by a load."""
        there = max(set(files.steps_in(self.folder)) - SkippedSteps(self.folder).steps(), default=-1)
        if there > self.step and not overwrite:
            by = ""
            with suppress(CheckpointError, OSError):
                by = f", saved by {in_words(files.read_manifest(self.folder, there).get('writer', {}))}"
            raise ValueError(
                f"step is {self.step}, but {self.folder} has step {there} already{by}; use another folder, or "
                f"overwrite=True, which removes the later steps when this one is complete"
            )

    def _begin(self, overwrite: bool) -> None:
        """Take the lock of the folder, on the first rank."""
        if self.group.rank > 0:
            return
        files.make_folder(self.folder)
        self.lock = WriterLock(self.folder)
        self._refuse_later_steps(overwrite)  # again: it may have been saved since
        manifests = (files.manifest_path(self.folder, step) for step in files.steps_in(self.folder))
        self.last_published = max((each.stat().st_mtime for each in manifests), default=0.0)

    def _describe_array(self, kind: str, name: Any, array: Array) -> dict[str, Any]:
        if not isinstance(name, str):
            raise TypeError(f"a name in {kind} is {name!r}; expected a str")
        device, view = locate("checkpoint.save", f"{kind}[{name!r}]", array)
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
            described["axis"] = axis % view.ndim
        return described

    def _write(self, first: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's file, and return the shards in it; of arrays that another rank writes, the checksums."""
        shards: dict[str, dict[str, Any]] = {"arrays": {}, "replicated": {}}
        writes_all = self.group.rank == 0
        name_of_file = f"rank-{self.group.rank}.npy"

        def write(out: Any) -> None:
            for kind, given in self.given.items():
                for name, described in first[kind].items():
                    array = files.stored(locate("checkpoint.save", name, given[name])[1], described.get("axis", 0))
                    is_written = out is not None and (writes_all or kind == "arrays")
                    shard = shards[kind][name] = {"crc32": []}
                    if is_written:
                        np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
                        length = array.shape[0] if array.ndim else 1
                        shard.update(file=name_of_file, offset=out.tell(), length=length)
                    for block in files.blocks(array):
                        shard["crc32"].append(zlib.crc32(block))
                        if is_written:
                            out.write(block)

        if not writes_all and not first["arrays"]:
            write(None)
            return {"file": None, "nbytes": 0, "shards": shards}
        files.make_folder(self.data)
        return {"file": name_of_file, "nbytes": files.write_durably(self.data / name_of_file, write), "shards": shards}

    def _verify(self, first: dict[str, Any], written: list[dict[str, Any]]) -> None:
        """Check, on the first rank, that replicated arrays are the same everywhere, and that all files are visible."""
        if self.group.rank > 0:
            return
        for name in first["replicated"]:
            sums = [each["shards"]["replicated"][name]["crc32"] for each in written]
            others = [self.group.ranks[rank] for rank, each in enumerate(sums) if each != sums[0]]
            if others:
                raise ValueError(
                    f"replicated[{name!r}] is not the same on rank {others[0]} as on rank {self.group.ranks[0]}; "
                    f"broadcast it first, or pass it in arrays"
                )
        self._see_all(written)

    def _see_all(self, written: list[dict[str, Any]]) -> None:
        """Check, on the first rank, that all files have the sizes that their ranks have written."""
        for rank, each in enumerate(written):
            if each["file"] is None:
                continue
            path = self.data / each["file"]
            try:
                with open(path, "rb") as file:  # on NFS it is opening that asks the server
                    nbytes = os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                raise CheckpointError(
                    f"rank {self.group.ranks[0]} can't see {path}, which rank {self.group.ranks[rank]} has written; "
                    f"the folder has to be on a file system that all ranks share, and no other job may write to it"
                ) from None
            if nbytes != each["nbytes"]:
                raise CheckpointError(
                    f"{path} has {nbytes} bytes, but rank {self.group.ranks[rank]} has written {each['nbytes']}"
                )

    def _undo(self) -> None:
        """Remove this rank's file of a checkpoint that has failed on every rank."""
        with suppress(OSError):
            os.unlink(self.data / f"rank-{self.group.rank}.npy")
        with suppress(OSError):
            os.rmdir(self.data)  # the last rank can

    def _publish(self, first: dict[str, Any], written: list[dict[str, Any]]) -> None:
        """Write the manifest, on the first rank: from then on there is a checkpoint."""
        if self.group.rank > 0:
            return
        for name, described in first["arrays"].items():
            described["shards"] = [each["shards"]["arrays"][name] for each in written]
            described["shape"][described["axis"]] = sum(shard["length"] for shard in described["shards"])
        for name, described in first["replicated"].items():
            described["shards"] = [written[0]["shards"]["replicated"][name]]
        body = {
            "format": files.FORMAT,
            "step": self.step,
            "ranks": self.group.size,
            "writer": writer(),
            "folder": self.data.name,
            "block": files.BLOCK,
            **{name: first[name] for name in ("metadata", "arrays", "replicated")},
        }
        path, is_undone = files.manifest_path(self.folder, self.step), False

        def undo() -> None:
            nonlocal is_undone
            is_undone = True
            shutil.rmtree(self.data, ignore_errors=True)

        try:
            files.write_durably(path, lambda out: out.write(files.sealed(body)), undo)
        except OSError as error:
            if is_undone:
                raise
            raise CheckpointError(f"{error}; step {self.step} may be published or not, and its arrays stay") from error
        if self.lock is not None and not self.lock.is_alone():  # another writer may have removed the arrays
            try:
                self._see_all(written)
            except CheckpointError:
                if files.data_of(self.folder, self.step) == self.data.name:
                    os.unlink(path)
                raise

    def _prune(self, keep: int | None, overwrite: bool) -> None:
        """Remove the steps that are no longer kept, on the first rank; warn of files that can't be removed."""
        skipped = SkippedSteps(self.folder)
        there = files.steps_in(self.folder)
        unwanted = skipped.steps() | ({each for each in there if each > self.step} if overwrite else set())
        if keep is not None:
            earlier = [each for each in there if each < self.step and each not in unwanted]
            unwanted |= set(earlier[: max(0, len(earlier) - (keep - 1))])
        # Younger files may be another writer's, unless the lock proves that there is none.
        oldest_spared = None if self.lock is not None and self.lock.is_alone() else self.last_published
        left = prune(self.folder, unwanted - {self.step}, self.step, self.data.name, oldest_spared)
        if left:
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            message = f"checkpoint.save: step {self.step} is saved, but older files can't be removed: {left[0]}{more}"
            warnings.warn(message + here(), RuntimeWarning, stacklevel=4)
        skipped.forget()


def _compare(group: ProcessGroup, every: list[dict[str, Any]]) -> None:
    """Raise, on every rank, if the ranks' arguments differ."""

    def same(what: str, values: list[Any]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"checkpoint.save: {what} is {value} on rank {group.ranks[rank]}, and {values[0]} on rank "
                    f"{group.ranks[0]}{here()}"
                )

    for what in ("step", "keep", "overwrite"):
        same(what, [each[what] for each in every])
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

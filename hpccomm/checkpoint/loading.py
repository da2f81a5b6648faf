"""Loading: choose a step, read each rank's part of its arrays, and fall back to earlier steps if a file is damaged."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..core import checks
from ..core.group import ProcessGroup
from ..errors import CheckpointWarning, on_rank
from . import files
from .nodes import Nodes
from .parts import length_of, read_part
from .skipped import SkippedSteps
from .together import CheckpointError, DamagedError, NoCheckpointError, of_first, together

OPERATION = "checkpoint.load"
ATTEMPTS = 10  # to read the last checkpoint, while another job saves newer ones and removes it


@dataclass
class Checkpoint:
    """A checkpoint as :func:`load` returns it.

    Parameters
    ----------
    step : int
        The step at which it was saved.
    arrays : dict of str to numpy.ndarray
        This rank's part of each sharded array, in C order.
    replicated : dict of str to numpy.ndarray
        The arrays that are the same on every rank.
    metadata : dict
        As JSON returns it: tuples have become lists, and keys text.
    ranks : int
        The number of ranks that saved it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hc.checkpoint.save(folder, {"x": np.arange(3.0)}, step=1)
    ...     checkpoint = hc.checkpoint.load(folder)
    >>> checkpoint.step, checkpoint.ranks, checkpoint.arrays
    (1, 1, {'x': array([0., 1., 2.])})
    """

    step: int
    arrays: dict[str, Any]
    replicated: dict[str, Any]
    metadata: dict[str, Any]
    ranks: int


@dataclass
class Loading:
    """One call of `load` on one rank."""

    group: ProcessGroup
    folder: Path
    parts: Mapping[str, slice]
    nodes: Nodes | None = None
    data: str = ""  # the folder of the step's arrays, once the manifest is read

    def run(self, step: Any, fall_back: bool) -> Checkpoint:
        """Return the checkpoint of `step`, or the last one, or an earlier one."""

        def describe() -> tuple[int | None, bool, bool]:
            return step if step is None else checks.integer("step", step), bool(fall_back), self.nodes is not None

        asked = together(self.group, OPERATION, describe)
        if len(set(asked)) > 1:
            what = "(step, fall_back, whether local is given)"
            raise ValueError(f"{OPERATION}: ranks ask for different things: {what} is {asked}{on_rank()}")
        checkpoint, skipped = self._load_from_nodes(self.nodes, step) if self.nodes is not None else (None, "")
        if checkpoint is None:
            checkpoint, skipped = self._load_from_folder(step, fall_back, skipped)
        if skipped and self.group.rank == 0:
            warnings.warn(f"{skipped}loaded step {checkpoint.step} instead", CheckpointWarning, stacklevel=3)
        if self.nodes is not None and step is None:
            self.nodes.skip_after(checkpoint.step)
        return checkpoint

    def _load_from_nodes(self, nodes: Nodes, step: Any) -> tuple[Checkpoint | None, str]:
        """Return the last step that is complete on the nodes, unless the folder has a later one; and others' errors."""
        skipped = ""
        there = nodes.look()
        last = of_first(self.group, OPERATION, lambda: max(files.steps_in(self.folder), default=-1))
        for each in there:
            if each != step if step is not None else each < last:
                continue
            try:
                body = nodes.manifest(each)
                together(self.group, OPERATION, partial(self._check_parts, body))
                return Checkpoint(
                    each, **nodes.read(body, self._bounds), metadata=body["metadata"], ranks=body["ranks"]
                ), skipped
            except CheckpointError as error:
                skipped += f"{error}; "
        return None, skipped

    def _load_from_folder(self, step: Any, fall_back: bool, damaged: str) -> tuple[Checkpoint, str]:
        """Return a step of the folder, and the errors of damaged ones; `damaged` has the errors so far."""
        below: int | None = None
        vanished = 0
        while True:
            chosen, before = of_first(self.group, OPERATION, partial(self._choose, step, below, damaged))
            self.data = ""
            try:
                checkpoint = self._read(chosen)
            except CheckpointError as error:
                is_gone = of_first(self.group, OPERATION, partial(self._is_gone, chosen))
                if is_gone and step is None and vanished < ATTEMPTS:
                    vanished += 1  # the writing job has removed it meanwhile, and saved a later one
                elif fall_back and before is not None:
                    if isinstance(error, DamagedError):  # the next save removes it
                        SkippedSteps(self.folder).add(chosen)
                    damaged += f"{error}; "
                    below = chosen
                else:
                    raise type(error)(f"{damaged}{error}; {self._hint(before)}") from error.__cause__
            else:
                return checkpoint, damaged

    def _choose(self, step: Any, below: int | None, damaged: str) -> tuple[int, int | None]:
        """Return the step to read and the one before it; called on the first rank."""
        there = files.steps_in(self.folder)
        if step is not None and step not in there:
            found = f"it has {', '.join(map(str, there))}" if there else "it has none"
            raise NoCheckpointError(f"{damaged}there is no checkpoint of step {step} in {self.folder}; {found}")
        limit = below if below is not None else None if step is None else step + 1
        candidates = [each for each in there if limit is None or each < limit]
        if not candidates:
            raise NoCheckpointError(f"{damaged}there is no checkpoint in {self.folder}")
        return candidates[-1], candidates[-2] if len(candidates) > 1 else None

    def _is_gone(self, step: int) -> bool:
        """Return True if the manifest of a step is gone or has been replaced; called on the first rank."""
        if step not in files.steps_in(self.folder):
            return True
        return self.data != "" and files.data_of(self.folder, step) not in (self.data, None)

    def _hint(self, before: int | None) -> str:
        if before is None:
            return "there is no step before it"
        return (
            f"to load the step before it: checkpoint.load({str(self.folder)!r}, step={before}), or fall_back=True to "
            f"have that done whenever a checkpoint is damaged"
        )

    def _read(self, step: int) -> Checkpoint:
        body = of_first(self.group, OPERATION, partial(files.read_manifest, self.folder, step))
        self.data = body["folder"]
        found = Checkpoint(step, {}, {}, body["metadata"], body["ranks"])

        def read() -> None:
            self._check_parts(body)
            path_of = (self.folder / self.data).joinpath
            for kind, arrays in (("arrays", found.arrays), ("replicated", found.replicated)):
                for name, described in body[kind].items():
                    begin, end = self._bounds(kind, name, described)
                    arrays[name] = read_part(path_of, body["block"], described, begin, end)

        together(self.group, OPERATION, read)
        return found

    def _check_parts(self, body: dict[str, Any]) -> None:
        if unknown := self.parts.keys() - body["arrays"].keys():
            raise ValueError(f"parts has {min(unknown, key=str)!r}; the sharded arrays are {sorted(body['arrays'])}")

    def _bounds(self, kind: str, name: str, described: dict[str, Any]) -> tuple[int, int]:
        """Return the first row of an array that this rank reads, and the end."""
        length = length_of(described)
        if kind == "replicated":
            return 0, length
        if name in self.parts:
            return _rows_of(name, self.parts[name], length)
        rank, size = self.group.rank, self.group.size
        shards = described["shards"]
        if size == len(shards):
            begin = sum(shard["length"] for shard in shards[:rank])
            return begin, begin + shards[rank]["length"]
        each, more = divmod(length, size)
        return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)


def _rows_of(name: str, part: Any, length: int) -> tuple[int, int]:
    if not isinstance(part, slice):
        raise TypeError(f"parts[{name!r}] is {part!r}; expected a slice")
    if part.step not in (None, 1):
        raise ValueError(f"parts[{name!r}] is {part!r}; expected a slice without a step")
    begin, end, _ = part.indices(length)
    return begin, max(begin, end)

"""Loading from the nodes' folders: locate each file, and get the parts that are on other nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from . import files
from .local import check_owner
from .parts import empty_rows, in_place, pieces_of
from .skipped import SkippedSteps
from .together import CheckpointError, together

PIECE = 4 * files.BLOCK  # bytes of a file per message; the sender holds one message for each rank that asks
Bounds = Callable[[str, str, "dict[str, Any]"], "tuple[int, int]"]  # the rows of an array that this rank reads


@dataclass
class Nodes:
    """The local level, as one rank loads it; `folder` is that of its own node."""

    operation: str
    group: ProcessGroup
    folder: Path
    seen: list[dict[str, Any]] = field(default_factory=list)  # from each node's first rank: its manifests and files

    def look(self) -> list[int]:
        """List the files on all nodes; return the steps that are published on some, in descending order."""
        self.seen = together(self.group, self.operation, self._look)
        return sorted({step for each in self.seen for step in each["steps"]}, reverse=True)

    def _look(self) -> dict[str, Any]:
        check_owner(self.folder)
        found: dict[str, Any] = {"steps": [], "files": {}}
        if self._leads():
            found["steps"] = files.steps_in(self.folder)
            with suppress(FileNotFoundError):
                for name in filter(files.DATA.fullmatch, os.listdir(self.folder)):
                    found["files"][name] = {each.name: each.stat().st_size for each in os.scandir(self.folder / name)}
        return found

    def _leads(self) -> bool:
        return self.group.local_rank == 0

    def skip_after(self, step: int) -> None:
        """Mark later steps on this node as skipped, because they are incomplete."""
        if self._leads():
            for each in files.steps_in(self.folder):
                if each > step:
                    SkippedSteps(self.folder).add(each)

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a step, from the first node where it is intact."""
        damaged = None
        for rank, each in enumerate(self.seen):
            if step in each["steps"]:
                mine = rank == self.group.rank
                read: Callable[[], Any] = partial(files.read_manifest, self.folder, step) if mine else dict
                try:
                    return together(self.group, self.operation, read)[rank]  # type: ignore[no-any-return]
                except CheckpointError as error:
                    damaged = error
        assert damaged is not None
        raise damaged

    def read(self, body: dict[str, Any], bounds: Bounds) -> dict[str, dict[str, Any]]:
        """Return this rank's arrays, sharded and replicated; CheckpointError if a file is intact on no node."""
        damaged: dict[tuple[int, str], str] = {}
        while True:
            places = self._places(body, damaged)
            found, more = Reading(self, body, places).run(bounds)
            if not more:
                return found
            damaged |= more

    def _places(self, body: dict[str, Any], damaged: dict[tuple[int, str], str]) -> dict[str, list[int]]:
        """Return the nodes that have each file of a step; CheckpointError if a file is on none."""
        sizes = files.sizes_of_files(body)
        places = {file: list[int]() for file in sizes}
        for rank, each in enumerate(self.seen):
            node = self.group.nodes[rank]
            for file, size in each["files"].get(body["folder"], {}).items():
                if sizes.get(file) == size and (node, file) not in damaged:
                    places[file].append(node)
        missing = [file for file, there in places.items() if not there]
        if missing:
            why = next((f" ({text})" for (_, file), text in damaged.items() if file == missing[0]), "")
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"step {body['step']} is not whole on the nodes of this job: {missing[0]}{why}{more} of "
                f"{len(places)} files is missing"
            )
        return places


@dataclass
class Reading:
    """One attempt to read a step: files on this node directly, parts of other files by messages."""

    nodes: Nodes
    body: dict[str, Any]
    places: dict[str, list[int]]
    damaged: dict[tuple[int, str], str] = field(default_factory=dict)  # found by this rank
    requests: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    targets: dict[int, list[Any]] = field(default_factory=dict)

    def run(self, bounds: Bounds) -> tuple[dict[str, dict[str, Any]], dict[tuple[int, str], str]]:
        """Return this rank's arrays, and the files that any rank found damaged; without any, the arrays are right."""
        group = self.nodes.group
        rows: dict[str, dict[str, Any]] = {"arrays": {}, "replicated": {}}

        def prepare() -> None:
            for kind, found in rows.items():
                for number, (name, described) in enumerate(self.body[kind].items()):
                    begin, end = bounds(kind, name, described)
                    found[name] = empty_rows(described, end - begin)
                    if kind == "arrays":
                        self._read_shards(number, described, begin, end, found[name])

        together(group, self.nodes.operation, prepare)  # no message before all ranks have memory
        for name, described in self.body["replicated"].items():
            self._read_replicated(described, files.as_bytes(rows["replicated"][name]))
        if len(set(group.nodes)) > 1:
            self._fetch(list(self.body["arrays"].values()))
        arrays = {
            kind: {name: in_place(self.body[kind][name], each) for name, each in found.items()}
            for kind, found in rows.items()
        }
        every = together(group, self.nodes.operation, lambda: self.damaged)
        return arrays, {place: text for each in every for place, text in each.items()}

    def _read_shards(self, number: int, described: dict[str, Any], begin: int, end: int, rows: Any) -> None:
        """Read the parts of an array that are on this node, and list the requests for the rest."""
        row = files.row_bytes(described)
        for index, low, high, place in pieces_of(described, begin, end, rows):
            shard, target = described["shards"][index], files.as_bytes(place)
            holder = self._holder(shard["file"])
            if holder == self.nodes.group.rank:
                self._read(shard, row, low * row, target)
            elif len(target) > 0:
                self.requests.setdefault(holder, []).append((number, index, low * row, high * row))
                self.targets.setdefault(holder, []).append(target)

    def _holder(self, file: str) -> int:
        """Return the rank that reads a file for this one: itself if its node has the file."""
        group = self.nodes.group
        if group.nodes[group.rank] in self.places[file]:
            return group.rank
        there = [rank for rank, node in enumerate(group.nodes) if node == self.places[file][0]]
        return there[files.rank_of(file) % len(there)]

    def _read(self, shard: dict[str, Any], row: int, first: int, target: Any) -> None:
        """Read bytes of a shard on this node; note a damaged file instead of raising."""
        file = shard["file"]
        path, size = self.nodes.folder / self.body["folder"] / file, shard["length"] * row
        try:
            files.patiently(partial(files.read_bytes, path, shard, size, self.body["block"], first, target))
        except (CheckpointError, OSError) as error:
            self.damaged[self.nodes.group.nodes[self.nodes.group.rank], file] = str(error)

    def _read_replicated(self, described: dict[str, Any], target: Any) -> None:
        """Read a replicated array locally if every node has it; otherwise the first holder broadcasts it."""
        group, (shard,) = self.nodes.group, described["shards"]
        places = self.places[shard["file"]]
        row = files.row_bytes(described)
        if set(group.nodes) <= set(places):
            self._read(shard, row, 0, target)
            return
        holder = group.nodes.index(places[0])
        if group.rank == holder:
            self._read(shard, row, 0, target)
        for begin in range(0, len(target), PIECE):
            group.broadcast(target[begin : begin + PIECE], holder)

    def _fetch(self, arrays: list[dict[str, Any]]) -> None:
        """Fetch the requested parts, in rounds of one piece between any two ranks; all ranks call it."""
        group = self.nodes.group
        asked = group.exchange_sparse({rank: np.array(each, np.int64) for rank, each in self.requests.items()})
        queues = {rank: list(_in_pieces(each.tolist())) for rank, each in asked.items()}
        rounds = np.array([max(map(len, queues.values()), default=0)])
        group.all_reduce(rounds, ReduceOp.MAX)
        places = {rank: self._targets(rank) for rank in self.requests}
        for turn in range(int(rounds[0])):
            sent = {rank: self._piece(arrays, *queue[turn]) for rank, queue in queues.items() if turn < len(queue)}
            for rank, piece in group.exchange_sparse(sent).items():
                next(places[rank])[:] = piece

    def _targets(self, rank: int) -> Iterator[Any]:
        """Yield the destination of each piece from a rank, in the order in which the pieces arrive."""
        for asked, target in zip(self.requests[rank], self.targets[rank]):
            for _, _, first, last in _in_pieces([asked]):
                yield target[first - asked[2] : last - asked[2]]

    def _piece(self, arrays: list[dict[str, Any]], number: int, shard: int, first: int, last: int) -> Any:
        """Return bytes that another rank has requested."""
        piece: Any = np.empty(last - first, np.uint8)
        described = arrays[number]
        self._read(described["shards"][shard], files.row_bytes(described), first, piece)
        return piece


def _in_pieces(asked: list[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Split requests into pieces that begin at multiples of PIECE, where checksum blocks begin."""
    for number, shard, first, last in asked:
        while first < last:
            end = min(last, (first // PIECE + 1) * PIECE)
            yield number, shard, first, end
            first = end

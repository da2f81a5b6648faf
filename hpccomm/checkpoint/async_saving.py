"""Saving while the program continues: the arrays are copied, a thread writes the copies, and the ranks agree later.

The thread only writes this rank's file; it never communicates. The ranks agree during calls that the program makes
anyway. Their messages use a communicator of their own, so they can't match the program's messages.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from ..api.groups import usable
from ..core.group import ProcessGroup, child_of
from ..core.registry import BackendConfig
from ..core.work import Work
from ..core.work_info import NOT_FOLLOWED
from ..errors import CheckpointWarning, DistError, on_rank
from ..job import failures, mpi_library
from .copies import Copies
from .saving import Saving
from .together import CheckpointError, Exchanges, exchanged, waited_for

under_way: dict[AsyncSaves, None] = {}  # those with a save under way, in the order of its start


class AsyncSave(Work):
    """The Work of one asynchronous save. No group follows it: ranks wait for the exchanges in it instead."""

    def __init__(self, saving: Saving, group: ProcessGroup, writer: SimpleQueue[Saving | None]) -> None:
        super().__init__()
        self.info = NOT_FOLLOWED._replace(
            op_type="checkpoint.save_async", number=saving.step, timeout=group.dispatcher.timeout
        )
        self.saving = saving
        self._exchanges = exchanged(saving.end(), functools.partial(words_of_all, group))
        self._exchange: Work | None = None
        self.lost: Exception | None = None  # the reason why the save was given up
        writer.put(saving)

    def poll(self) -> bool:
        """Return True if the checkpoint is complete; raise the error if it has failed (on every rank)."""
        if self.lost is not None:
            raise self.lost
        if not self.saving.is_written.is_set():
            return False
        while self._exchange is None or self._exchange.has_ended():
            try:
                if self._exchange is not None:
                    self._exchange.wait()  # raises its error
                self._exchange = next(self._exchanges)
            except StopIteration as end:
                self._tell(end.value)
                return True
        return False

    def block(self) -> None:
        """Block until the checkpoint is complete."""
        self.saving.is_written.wait()
        while not self.poll():
            if self._exchange is not None:
                self._exchange.wait()

    def _tell(self, warned: list[str] | None) -> None:
        if warned is None:  # the generator had ended before
            raise CheckpointError(f"{self.saving.operation}: it was interrupted before its end{on_rank()}")
        for text in warned:
            self.add_done_callback(functools.partial(_warn, text))  # -W error can't raise there

    def let_go(self) -> None:
        """Wait until the thread has written the file, and release the folder."""
        self.saving.is_written.wait()
        self._exchanges.close()
        self.saving.release()


class AsyncSaves:
    """The asynchronous saves of one group: its memory for copies, and at most one save under way."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.own = group if group.size == 1 else own_group(group)
        self._copies = Copies()
        self._under_way: AsyncSave | None = None
        # One thread for all saves: the program would wait for the start of a new one.
        self._writer: SimpleQueue[Saving | None] = SimpleQueue()
        threading.Thread(target=_write, args=(self._writer,), name="hpccomm-checkpoint", daemon=True).start()
        weakref.finalize(self, self._writer.put, None)

    @classmethod
    def of(cls, group: ProcessGroup) -> AsyncSaves:
        """Return the saves of a group; the first call is collective."""
        if cls not in group.attachments:
            group.attachments[cls] = cls(group)
            _finish_at_exit()
        return cast("AsyncSaves", group.attachments[cls])

    def begin(self, saving: Saving, metadata: Any, keep: Any, overwrite: bool) -> Work:
        """Copy the arrays, and start writing them; every rank calls it."""
        self.finish()
        try:
            saving.begin(metadata, keep, overwrite, functools.partial(self._copy, saving))
            saving.operation += f" of step {saving.step}"  # later calls raise its errors
            self._under_way = work = AsyncSave(saving, self.own, self._writer)
        except BaseException:
            saving.release()
            if saving.first:  # the arguments were right, so copies may have been made
                self._free(saving)
            raise
        under_way[self] = None
        work.add_done_callback(functools.partial(self._free, saving))
        return work

    def finish(self) -> None:
        """Complete the save under way; every rank calls it. Raise its error on every rank, unless all have seen it."""
        work = self._under_way
        if work is None:
            return
        was_seen = work.error_was_seen
        try:
            work.wait()
        except Exception as error:
            if not work.is_notified:  # a timeout, or a signal handler's exception
                raise
            self._end(work)
            if isinstance(error, DistError) or not all(waited_for(words_of_all(self.own, was_seen))):
                raise
        else:
            self._end(work)

    def give_up(self, dead: Sequence[int]) -> None:
        """Give up the save under way, without the other ranks: the global ranks `dead` have died."""
        work = self._under_way
        if work is not None:
            work.lost = failures.rank_failed(work.saving.operation, tuple(dead))
            self._end(work)

    def _end(self, work: AsyncSave) -> None:
        self._under_way = None
        under_way.pop(self, None)
        work.let_go()
        self._free(work.saving)

    def _free(self, saving: Saving, _: object = None) -> None:
        """Keep or free the memory for copies, which are no longer used."""
        saving.views.clear()
        self._copies.keep(saving.keep_memory)

    def _copy(self, saving: Saving) -> None:
        """Replace the arrays by copies."""
        names = [(kind, name) for kind, views in saving.views.items() for name in views]
        try:
            copies = self._copies.of([saving.views[kind][name] for kind, name in names])
        except MemoryError as error:
            raise MemoryError(f"{error}; checkpoint.save needs no memory for copies") from None
        for (kind, name), copy in zip(names, copies):
            saving.views[kind][name] = copy
        saving.given = {}


def _write(savings: SimpleQueue[Saving | None]) -> None:
    """Write the files of saves, in a thread."""
    while (saving := savings.get()) is not None:
        saving.write()
        del saving  # free it and its group while the thread waits


def _warn(text: str, _: Work) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=2)


def own_group(group: ProcessGroup) -> ProcessGroup:
    """Return a new group of the same ranks, which is destroyed with `group`; every rank calls it."""
    usable("checkpoint.save_async", group)
    group.agree_on("checkpoint.save_async")
    with failures.translating("checkpoint.save_async", group.comm):
        comm: Any = group.comm
        comm = comm.Dup()
    limits = {"timeout": group.timeout, "on_timeout": group.on_timeout}
    own = child_of(
        group.owner, comm, group.ranks, BackendConfig("cpu:mpi"), limits, f"checkpoints of {group.name}", None
    )
    group.owner.children.remove(own)
    group.children.append(own)
    own.on_destroy = group.children.remove
    return own


def words_of_all(group: ProcessGroup, mine: object) -> Exchanges[list[Any]]:
    """Return the words of all ranks without blocking; JSON must be able to hold them."""
    if group.size == 1:
        return [mine]
    word = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    lengths = np.empty(group.size, np.int64)
    yield group.all_gather_single(lengths, np.array([word.size]), async_op=True)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: word.size] = word
    rows = np.empty((group.size, padded.size), np.uint8)
    yield group.all_gather_single(rows, padded, async_op=True)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]


@functools.cache
def _finish_at_exit() -> None:
    atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    """Complete the saves under way when a program ends without destroying its groups."""
    if os.getpid() != pid or mpi_library.is_finalized():
        return
    for saves in list(under_way):
        try:
            saves.finish()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)  # ends the job, if there are other ranks

"""Checkpoints: the arrays of the ranks of a group on disk, whole at every moment.

:func:`save` writes them, :func:`load` reads them on any number of ranks. One folder has the checkpoints of one run::

    step-0000000120.json           the manifest, written last: it makes the checkpoint exist
    step-0000000120-5f0c93ab/      its arrays
        rank-0.npy                 the arrays of rank 0: .npy records, at the offsets in the manifest
    .saving                        the lock of a running save

Every file is written under another name, flushed to the disk (fsync) and renamed; so are the entries of folders. Files
that no manifest names are litter of a killed run: nobody reads them, and the next save removes them.

These are files of our own rather than HDF5 or zarr: a kill leaves them whole through fsync and rename, and parallel
HDF5 has to be built for the MPI. Checksums are CRC-32: against accidents, and three times as fast as hashlib's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api.world import member
from ..core.arrays import Array
from ..core.group import ProcessGroup
from ..core.non_member import Group, NonMember
from ..core.work import CompletedWork, Work
from ..errors import on_rank
from .async_saving import AsyncSaves
from .destination import Destination
from .files import steps_in
from .levels import Levels
from .loading import OPERATION, Checkpoint, Loading
from .local import local_folder
from .nodes import Nodes
from .saving import Saving
from .together import CheckpointError, NoCheckpointError

__all__ = [
    "Checkpoint", "CheckpointError", "NoCheckpointError", "finish", "latest", "load", "save", "save_async", "steps",
]  # fmt: skip


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the checkpoints in `folder`. No communication: any process may ask.

    Parameters
    ----------
    folder : str or path
        It need not exist.

    Returns
    -------
    list of int
        In ascending order. The checkpoints are not verified.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (10, 20, 30):
    ...         hc.checkpoint.save(folder, {"x": np.ones(3)}, step)
    ...     hc.checkpoint.steps(folder)  # two are kept
    [20, 30]
    """
    return steps_in(Path(folder))


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Return the step of the last checkpoint in `folder`. No communication: any process may ask.

    Ranks that ask while another job saves may get different answers. To go on from the last checkpoint, or to begin
    where there is none, call :func:`load` and expect :class:`NoCheckpointError`, which all ranks get alike.

    Parameters
    ----------
    folder : str or path
        It need not exist.

    Returns
    -------
    int or None
        None where there is no checkpoint.

    Examples
    --------
    >>> hc.checkpoint.latest("a_folder_that_is_not_there") is None
    True
    """
    return max(steps(folder), default=None)


def save(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    step: int,
    *,
    replicated: Mapping[str, Array] | None = None,
    metadata: Mapping[str, Any] | None = None,
    axis: int | Mapping[str, int] = 0,
    keep: int | None = 2,
    overwrite: bool = False,
    local: str | os.PathLike[str] | None = None,
    partner: bool = True,
    drain_every: int | None = 10,
    group: Group | None = None,
) -> None:
    """Write a checkpoint; every rank of the group calls it, with its part of each array.

    A program that is killed at any moment, on any rank, leaves the previous checkpoint whole. When the call returns,
    the new one is on the disk.

    Parameters
    ----------
    folder : str or path
        On a file system that all ranks share. It is made where it is missing. One job at a time writes to it, of which
        the others are told; any number may read.
    arrays : dict of str to array
        This rank's part of each *sharded* array: the global array is the parts of all ranks in the order of the ranks,
        one after the other along `axis`. Parts may have different lengths, also 0. The names, dtypes and the
        other dimensions are the same on every rank. GPU arrays are copied to the host one by one. Every dtype but
        object.
    step : int
        Its number, 0 or more, the same on every rank.
    replicated : dict of str to array, optional
        Arrays that are the same on every rank, bit for bit, which is checked. The group's first rank writes them.
    metadata : dict, optional
        What JSON can hold, and NumPy's numbers. That of the group's first rank counts.
    axis : int or dict of str to int
        Along which axis arrays are sharded; a dict has it for some of them, the others have 0.
    keep : int or None
        How many checkpoints stay, with this one, in `folder` and in `local`; None: all. The oldest are removed when
        this one is complete.
    overwrite : bool
        Let a step be saved when the folder has later ones, which are removed when this one is complete: for a program
        that went back. Default: ValueError, before anything is written. The last step itself can always be saved again,
        and steps that a load has skipped do not count.
    local : str or path, optional
        Storage of each node alone, such as ``/local/scratch``: one path for all ranks of a node, and perhaps another on
        another node. Each checkpoint goes to a folder in there that belongs to `folder`; :func:`load` finds it if it is
        given both. Default: everything goes to `folder`.
    partner : bool
        With `local`: give a rank of the next node a copy of each rank's file, so that no checkpoint is lost with a
        node. RuntimeWarning if there is one node.
    drain_every : int or None
        With `local`: how many checkpoints are one that goes to `folder`, too. 1: each one; None: none.
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    None
        The checkpoint is complete on the disk.

    Raises
    ------
    CheckpointError
        On every rank: a rank could not write (the disk is full, permissions), its file can't be seen by the group's
        first rank, or another process is saving to the folder. The checkpoints before are as they were.
    ValueError, TypeError
        On every rank: ranks differ in names, dtypes or shapes, replicated arrays differ, an array is 0-d and not
        replicated, the folder has a later step, `metadata` is not for JSON.

    Examples
    --------
    >>> import tempfile
    >>> cells = np.arange(4.0) + 4 * hc.get_rank()  # this rank's part of 4 cells for each rank
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hc.checkpoint.save(folder, {"cells": cells}, step=7, replicated={"time": np.array(0.5)})
    ...     hc.checkpoint.latest(folder)
    7
    """
    found = member(group)
    if isinstance(found, NonMember):
        found.warn("checkpoint.save")
        return
    finish(found)
    given = {"arrays": arrays, "replicated": replicated or {}}
    levels = Levels.of(found, Path(folder), local, partner, drain_every, lambda: AsyncSaves.of(found).own)
    saving = Saving("checkpoint.save", found, Destination(Path(folder)), step, given, axis, levels=levels)
    for text in saving.run(metadata, keep, overwrite):
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def save_async(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    step: int,
    *,
    replicated: Mapping[str, Array] | None = None,
    metadata: Mapping[str, Any] | None = None,
    axis: int | Mapping[str, int] = 0,
    keep: int | None = 2,
    overwrite: bool = False,
    local: str | os.PathLike[str] | None = None,
    partner: bool = True,
    drain_every: int | None = 10,
    keep_memory: int | None = None,
    group: Group | None = None,
) -> Work:
    """Copy what a checkpoint is made of, and write it while the program goes on; every rank of the group calls it.

    When the call returns, the arrays have been copied, and may change. A thread writes this rank's file, and does not
    communicate. The checkpoint exists when all ranks have agreed on it, which they do in `wait` of the Work, in the
    next :func:`save`, :func:`save_async`, :func:`load` or :func:`finish` of this group, when it is destroyed, and at
    the end of the program; and in `is_completed`, if all of them ask again and again. Until then, a program that is
    killed leaves the checkpoint before.

    Parameters
    ----------
    folder, arrays, step, replicated, metadata, axis, keep, overwrite, local, partner, drain_every
        As for :func:`save`.
    keep_memory : int, optional
        The memory for the copies stays allocated for the next call, up to this number of bytes on this rank; if it has
        more, it is freed when the checkpoint is complete. 0: always, which makes every call about as slow as the first.
        Default: it stays, until the group is destroyed.
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    Work
        It may be dropped. Its `sequence_number` is the step.

    Raises
    ------
    CheckpointError, ValueError, TypeError
        On every rank: as :func:`save`, of what is known when it returns. What goes wrong later (the disk is full) is
        raised on every rank by the call in which they agree, with the step in its message; that call has done nothing
        else. If all ranks have seen the error in `wait`, it is not raised again.
    MemoryError
        On every rank: there is no memory for the copies of some rank.

    Examples
    --------
    >>> import tempfile
    >>> cells = np.arange(4.0) + 4 * hc.get_rank()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     work = hc.checkpoint.save_async(folder, {"cells": cells}, step=7)
    ...     cells[:] = 0  # the next step of the program
    ...     work.wait()
    ...     hc.checkpoint.load(folder).arrays["cells"]  # on rank 0
    True
    array([0., 1., 2., 3.])
    """
    found = member(group)
    if isinstance(found, NonMember):
        found.warn("checkpoint.save_async")
        return CompletedWork()
    given = {"arrays": arrays, "replicated": replicated or {}}
    saves = AsyncSaves.of(found)
    levels = Levels.of(found, Path(folder), local, partner, drain_every, lambda: saves.own)
    saving = Saving("checkpoint.save_async", found, Destination(Path(folder)), step, given, axis, keep_memory, levels)
    return saves.begin(saving, metadata, keep, overwrite)


def finish(group: Group | None = None) -> None:
    """Complete the checkpoint that :func:`save_async` has begun; every rank of the group calls it.

    Without one under way it returns at once.

    Parameters
    ----------
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    None
        The checkpoint is complete on the disk.

    Raises
    ------
    CheckpointError, ValueError
        On every rank: as :func:`save_async`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     work = hc.checkpoint.save_async(folder, {"x": np.ones(3)}, step=1)
    ...     hc.checkpoint.finish()
    ...     hc.checkpoint.steps(folder)
    [1]
    """
    found = member(group)
    if isinstance(found, ProcessGroup) and AsyncSaves in found.attachments:
        found.attachments[AsyncSaves].finish()


def load(
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    parts: Mapping[str, slice] | None = None,
    fall_back: bool = False,
    local: str | os.PathLike[str] | None = None,
    group: Group | None = None,
) -> Checkpoint:
    """Read a checkpoint; every rank of the group calls it, and any number of ranks can read what others have written.

    On as many ranks as have saved it each rank gets the part of each sharded array that the rank of the same number
    saved. On another number of ranks each gets an even part (those of :func:`numpy.array_split`). Every byte that is
    read is compared with its checksum.

    Parameters
    ----------
    folder : str or path
        Where :func:`save` wrote it.
    step : int, optional
        Which one. Default: the last.
    parts : dict of str to slice, optional
        What this rank reads instead, for some or all sharded arrays: indices of the global array along the axis that
        it is sharded along.
    fall_back : bool
        Read the step before, and warn, where a checkpoint is damaged; the next save removes what was skipped. Default:
        CheckpointError.
    local : str or path, optional
        That of :func:`save`: read the last step that is whole, on the nodes or in `folder`. What a rank needs of other
        nodes' files comes by messages. A later step that is not whole is a warning, and the next save removes it.
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    Checkpoint
        Its arrays are host arrays in memory of their own.

    Raises
    ------
    NoCheckpointError
        On every rank: there is none.
    CheckpointError
        On every rank: a file is damaged or can't be read; the message says which, and what to type.
    ValueError, TypeError
        On every rank: `parts` names what is not there or not sharded, or has a slice with a step.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hc.checkpoint.save(folder, {"x": np.arange(4)}, step=3, metadata={"rate": 0.1})
    ...     whole = hc.checkpoint.load(folder)
    ...     some = hc.checkpoint.load(folder, parts={"x": slice(1, 3)})
    >>> whole.step, whole.metadata, whole.arrays["x"], some.arrays["x"]
    (3, {'rate': 0.1}, array([0, 1, 2, 3]), array([1, 2]))
    """
    found = member(group)
    if isinstance(found, NonMember):
        raise ValueError(
            f"checkpoint.load: this process is not a member of {found!r}; only its members load{on_rank()}"
        )
    finish(found)
    nodes = None if local is None else Nodes(OPERATION, found, local_folder(local, Path(folder)))
    return Loading(found, Path(folder), parts or {}, nodes).run(step, fall_back)

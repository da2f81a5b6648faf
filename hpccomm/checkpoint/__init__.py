"""Checkpoints: the arrays of a group's ranks on disk; a program that is killed leaves the last one complete.

:func:`save` writes checkpoints, :func:`load` reads them on any number of ranks. Each run has its own folder::

    step-0000000120.json           the manifest, written last: it makes the checkpoint exist
    step-0000000120-5f0c93ab/      its arrays
        rank-0.npy                 the arrays of rank 0: .npy records, at the offsets in the manifest
    .saving                        the lock of a running save

Every file is written under another name, flushed to the disk (fsync) and renamed; folder entries are flushed, too. A
file that no manifest names was left by a killed run: load ignores it, and the next save removes it.

The format is our own, not HDF5 or zarr: fsync and rename keep it complete after a kill, and parallel HDF5 must be
built for the MPI. Checksums are CRC-32: they detect accidents, and are three times as fast as hashlib's.
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
from ..core.renamed import renamed_arguments
from ..core.work import CompletedWork, Work
from ..errors import CheckpointWarning, on_rank
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


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return __all__


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the checkpoints in `folder`. No communication: any process may call it.

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
    """Return the step of the last checkpoint in `folder`. No communication: any process may call it.

    Ranks that call it while another job saves may get different answers. To continue from the last checkpoint, or start
    if there is none, call :func:`load` and catch :class:`NoCheckpointError`, which is raised on all ranks alike.

    Parameters
    ----------
    folder : str or path
        It need not exist.

    Returns
    -------
    int or None
        None if there is no checkpoint.

    Examples
    --------
    >>> hc.checkpoint.latest("a_folder_that_is_not_there") is None
    True
    """
    return max(steps(folder), default=None)


@renamed_arguments(drain_every="flush_every")
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
    flush_every: int | None = 10,
    group: Group | None = None,
) -> None:
    """Write a checkpoint; every rank of the group calls it, with its part of each array.

    A program that is killed at any moment, on any rank, leaves the previous checkpoint complete. When the call returns,
    the new one is on the disk.

    Parameters
    ----------
    folder : str or path
        A folder on a file system that all ranks share; created if missing. One job at a time may write to it: other
        jobs get an error. Any number may read.
    arrays : dict of str to array
        This rank's part of each *sharded* array: the parts of all ranks, in rank order along `axis`, make the global
        array. Parts may have different lengths, also 0. Names, dtypes and the other dimensions must be the same on
        every rank. GPU arrays are copied to the host one by one. Dtypes: those that .npy files can hold, without
        objects, and ml_dtypes'.
    step : int
        The number of the checkpoint, 0 or more, the same on every rank.
    replicated : dict of str to array, optional
        Arrays that are the same on every rank, bit for bit (this is checked). The group's first rank writes them.
    metadata : dict, optional
        Values that JSON can hold, and NumPy numbers. The metadata of the group's first rank is saved.
    axis : int or dict of str to int
        The axis along which arrays are sharded; with a dict, other arrays are sharded along axis 0.
    keep : int or None
        The number of checkpoints that stay, including this one, in `folder` and in `local`; None: all. The oldest are
        removed when this one is complete.
    overwrite : bool
        Allow saving a step although the folder has later ones, which are removed when this one is complete: for a
        program that went back. Default: ValueError, before anything is written. The last step can always be saved
        again, and steps that a load has skipped do not count.
    local : str or path, optional
        Storage of one node, such as ``/local/scratch``: the same path for all ranks of a node; nodes may differ. Each
        checkpoint goes to a subfolder that belongs to `folder`; pass both to :func:`load` to find it. Default:
        everything goes to `folder`.
    partner : bool
        With `local`: copy each rank's file to a rank of the next node, so that losing a node loses no checkpoint.
        CheckpointWarning if there is only one node.
    flush_every : int or None
        With `local`: every how many checkpoints one also goes to `folder`. 1: each one; None: none.
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    None
        The checkpoint is complete on the disk.

    Raises
    ------
    CheckpointError
        On every rank: a rank could not write (disk full, permissions), the group's first rank can't see a rank's file,
        or another process is saving to the folder. Earlier checkpoints are unchanged.
    ValueError, TypeError
        On every rank: ranks differ in names, dtypes or shapes, replicated arrays differ, an array is 0-d and not
        replicated, the folder has a later step, or JSON can't hold `metadata`.

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
    given = {"arrays": arrays, "replicated": {} if replicated is None else replicated}
    path = _path("checkpoint.save", folder)
    levels = Levels.of(found, path, local, partner, flush_every, lambda: AsyncSaves.of(found).own)
    saving = Saving("checkpoint.save", found, Destination(path), step, given, axis, levels=levels)
    for text in saving.run(metadata, keep, overwrite):
        warnings.warn(text, CheckpointWarning, stacklevel=3)


@renamed_arguments(drain_every="flush_every")
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
    flush_every: int | None = 10,
    keep_memory: int | None = None,
    group: Group | None = None,
) -> Work:
    """Copy the arrays of a checkpoint, and write it while the program continues; every rank of the group calls it.

    When the call returns, the arrays have been copied and may change. A thread writes this rank's file, and does not
    communicate. The checkpoint exists once all ranks have agreed on it: in the Work's `wait`, in the group's next
    :func:`save`, :func:`save_async`, :func:`load` or :func:`finish`, when the group is destroyed, at the end of the
    program, or in `is_completed` if all ranks call it repeatedly. A program that is killed before that leaves the
    previous checkpoint.

    Parameters
    ----------
    folder, arrays, step, replicated, metadata, axis, keep, overwrite, local, partner, flush_every
        As for :func:`save`.
    keep_memory : int, optional
        Memory for the copies stays allocated for the next call if it has at most this number of bytes on this rank;
        otherwise it is freed when the checkpoint is complete. 0: always free it; every call is then about as slow as
        the first. Default: keep it until the group is destroyed.
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    Work
        The program need not keep it. Its `sequence_number` is the step.

    Raises
    ------
    CheckpointError, ValueError, TypeError
        On every rank: errors that are known when it returns, as in :func:`save`. Later errors (disk full) are raised on
        every rank by the call in which the ranks agree, with the step in the message; that call does nothing else. If
        all ranks have seen the error in `wait`, it is not raised again.
    MemoryError
        On every rank: some rank has no memory for the copies.

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
    given = {"arrays": arrays, "replicated": {} if replicated is None else replicated}
    saves = AsyncSaves.of(found)
    path = _path("checkpoint.save_async", folder)
    levels = Levels.of(found, path, local, partner, flush_every, lambda: saves.own)
    saving = Saving("checkpoint.save_async", found, Destination(path), step, given, axis, keep_memory, levels)
    return saves.begin(saving, metadata, keep, overwrite)


def finish(group: Group | None = None) -> None:
    """Complete the checkpoint that :func:`save_async` has begun, if any; every rank of the group calls it.

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
    """Read a checkpoint, on any number of ranks; every rank of the group calls it.

    On as many ranks as saved it, each rank gets the part of each sharded array that the same rank saved. On another
    number of ranks, each gets an even part (as in :func:`numpy.array_split`). Every byte that is read is compared with
    its checksum.

    Parameters
    ----------
    folder : str or path
        The folder that was given to :func:`save`.
    step : int, optional
        The step to read. Default: the last.
    parts : dict of str to slice, optional
        The part of some or all sharded arrays that this rank reads instead: indices of the global array along its
        sharded axis.
    fall_back : bool
        If a checkpoint is damaged, warn and read the step before it; the next save removes the damaged ones. Default:
        CheckpointError.
    local : str or path, optional
        The `local` of :func:`save`: read the last complete step, from the nodes or from `folder`. Parts in other nodes'
        files arrive by messages. A later, incomplete step causes a warning, and the next save removes it.
    group
        See :mod:`hpccomm.api.collectives`.

    Returns
    -------
    Checkpoint
        Its arrays are host arrays that share no memory.

    Raises
    ------
    NoCheckpointError
        On every rank: there is no checkpoint, or not the one of `step`.
    CheckpointError
        On every rank: a file is damaged or can't be read; the message names it, and says what to type.
    ValueError, TypeError
        On every rank: `parts` names an array that is missing or not sharded, or has a slice with a step.

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
    path = _path(OPERATION, folder)
    nodes = None if local is None else Nodes(OPERATION, found, local_folder(local, path))
    return Loading(found, path, parts or {}, nodes).run(step, fall_back)


def _path(operation: str, folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).absolute()  # a program may change its folder during save_async
    except TypeError:
        raise TypeError(f"{operation}: folder is a {type(folder).__name__}; expected a path{on_rank()}") from None

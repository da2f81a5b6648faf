"""This rank's report and recording, written on demand, or because the job is about to end."""

from __future__ import annotations

from pathlib import Path

from ..errors import DistError
from . import watchdog
from .groups_seen import groups
from .report import Reporter
from .trace.files import save


def dump(reason: str = "asked by the program") -> Path:
    """Write the report of this rank, at any moment and from any thread; other ranks are not asked.

    Parameters
    ----------
    reason : str
        Is shown by ``hpccomm debug``.

    Returns
    -------
    pathlib.Path
        The file, ``rank<N>.json`` in ``HPCCOMM_DEBUG_DIR`` (default: a folder ``hpccomm-debug-*`` in the working
        directory, made now); N is the rank in MPI.COMM_WORLD.

    Raises
    ------
    DistError
        Before init_process_group.

    Examples
    --------
    >>> import json, hpccomm.debug
    >>> file = hpccomm.debug.dump("an example")
    >>> file.name, json.loads(file.read_text())["reason"]
    ('rank0.json', 'an example')
    """
    current = watchdog.current()
    if current is not None:
        return current.reporter.write(reason, current.elapsed())
    group = next(iter(groups()), None)
    if group is None:
        raise DistError("hpccomm.debug.dump: there is no process group: call hpccomm.init_process_group() first")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return Reporter(comm.Get_rank(), comm.Get_size(), group.settings.debug_dir, group.processes).write(reason)


def last_words(reason: str) -> None:
    """Write this rank's report and its recording, because the job is about to end."""
    save(dump(reason).parent)

"""Going on without ranks that have died: what the survivors call.

A shrunk world is a new world, and the program makes its groups again: global ranks are counted anew, and groups that
changed their ranks under its hands would be wrong in silence. `agree` does not pass the door, for it works in failed
groups. A communicator that is given up is not freed: MPI may still hold messages for it.
"""

from __future__ import annotations

from .core.group import ProcessGroup, child_of, make_group
from .core.members import abridged
from .core.non_member import Group
from .core.options import fields_of
from .errors import UnsupportedOperationError, here
from .groups import usable
from .job import failures, mpi_library
from .world import connect, current_world, is_initialized, member, member_of, replace_world


def shrink_group(group: ProcessGroup | None = None) -> ProcessGroup:
    """Make a group of the ranks of `group` that are alive, to go on with after a :class:`RankFailedError`.

    Every surviving rank of `group` calls it. Those that still wait in `group` for a rank that does not come are woken
    by a RankFailedError, and have to call it too. Several ranks may have died, also during the call.

    The world is replaced: ``group=None`` means the new one from here on. Ranks are counted anew from 0, in their old
    order, and `get_rank` returns the new one. Groups made from the old world refuse every operation: make them again.
    A smaller group is replaced in its world, which stays as it is, and so do the global ranks.

    Operations in flight in the old group end with RankFailedError. Its backends are closed, and made again when the
    first array comes along. Its node-shared arrays stay readable, but their operations don't work. The call stands for
    MPIX_Comm_revoke and MPIX_Comm_shrink of ULFM.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    ProcessGroup
        With the name, the backends and the timeout of `group`, but not its hooks.

    Raises
    ------
    UnsupportedOperationError
        The job does not survive dead ranks: it was not started with ``mpirun --with-ft ulfm`` (Open MPI).
    DistError
        `group` has been destroyed or shrunk before.

    Examples
    --------
    >>> def step(x):
    ...     hc.all_reduce(x)
    >>> try:
    ...     step(np.ones(1))
    ... except hc.RankFailedError as error:  # on 4 ranks, of which rank 1 was killed: error.ranks is (1,)
    ...     world = hc.shrink_group()
    ...     step(np.ones(1))
    >>> hc.get_world_size()  # 3
    1
    """
    old = member_of("shrink_group", group)
    usable("shrink_group", old)
    if not failures.is_on():
        raise UnsupportedOperationError(
            f"shrink_group: this job does not survive dead ranks; {failures.HOW_TO_START}{here()}"
        )
    is_world = is_initialized() and old is current_world()
    new = _of_survivors(old)
    if is_world:
        replace_world(new)
    with failures.translating("shrink_group", new.comm):
        connect(new)
    return new


def agree(flag: bool, group: Group | None = None) -> bool:
    """Return True, on every rank, if `flag` is true on all ranks of `group` that are alive: MPIX_Comm_agree of ULFM.

    Every rank that is alive calls it. Under ``mpirun --with-ft ulfm`` (Open MPI) it gives its answer also while ranks
    die, and in a group that has lost ranks, having acknowledged the failures first; otherwise it is an ordinary
    reduction.

    Parameters
    ----------
    flag : bool
        The vote of this rank.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    bool

    Raises
    ------
    DistError
        `group` has been destroyed or shrunk.

    Examples
    --------
    >>> hc.agree(True)
    True
    >>> hc.agree(hc.get_rank() > 0)  # rank 0 says no
    False
    """
    return member(group).agree(flag)


def _of_survivors(old: ProcessGroup) -> ProcessGroup:
    """Make the group of those ranks of `old` that live, and abandon `old`; each of them calls it."""
    comm, members = failures.shrink(old.comm)
    owner = old.owner
    ranks = tuple(old.ranks[rank] for rank in members)
    dead = tuple(rank for rank in old.ranks if rank not in ranks)
    limits = {"timeout": old.timeout, "on_timeout": old.on_timeout}
    reason = f"because ranks {abridged(dead)} have died" if dead else "although nobody has died"
    if owner is old:
        old.on_destroy = None
        for child in list(old.children):
            child.give_up(dead, f"was made from a group that has been shrunk, {reason}; make it again")
        mpi_library.private(comm).Set_name(f"hpccomm {old.name}")
        nodes = tuple(old.nodes[rank] for rank in members)
        fields = fields_of(old)
        fields |= {"rank": comm.Get_rank(), "size": len(members), "ranks": (), "comm": comm, "nodes": nodes}
        with failures.translating("shrink_group", comm):
            fields["place"] = old.place.without_the_dead(comm, nodes)
    old.give_up(dead, f"has been shrunk, {reason}; go on with what shrink_group returned")
    if owner is old:
        new = make_group(**fields)
    else:
        new = child_of(owner, comm, ranks, old.config, limits, old.name, old.description, is_duplicated=True)
    old.successor = new
    return new

"""Continue after ranks have died: shrink the group, or replace dead ranks by spares.

Both functions replace the world, and the program makes its groups again. After shrink_group, global ranks are
renumbered; if old groups changed their ranks too, programs would silently use wrong ones. After replace_failed some
ranks are new processes, which know none of the groups. `agree` bypasses the dispatcher, because it works in failed
groups. A failed communicator is not freed: MPI may still hold messages for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..core.annotations import Integer
from ..core.c10d_names import c10d_names
from ..core.group import ProcessGroup, child_of, make_group
from ..core.members import abridged
from ..core.non_member import Group
from ..core.options import fields_of
from ..errors import DistError, TooFewSparesError, UnsupportedOperationError, on_rank
from ..job import failures, mpi_library
from .groups import checked_ranks, count_names_anew, create_group, usable
from .world import connect, current_world, is_initialized, member, member_of, set_world


@c10d_names("shrink_flags", only_none=("pg_options",))
def shrink_group(
    ranks_to_exclude: Sequence[Integer] | ProcessGroup | None = None, group: ProcessGroup | None = None
) -> ProcessGroup:
    """Make a group of the surviving ranks of `group`, to continue after a :class:`RankFailedError`.

    Every surviving rank of `group` calls it. A rank that still waits in `group` for a dead rank gets a
    RankFailedError, and must then call it too. Several ranks may have died, also during the call.

    If `group` is the world, the new group becomes the world, which ``group=None`` means from now on. Ranks are
    renumbered from 0 in their old order, and `get_rank` returns the new rank. Groups made from the old world refuse
    every operation: make them again. If `group` is smaller, its world and the global ranks stay the same; shrink the
    world, too, before it is destroyed. In a world with spares only the world can be shrunk.

    Operations in flight in the old group end with RankFailedError. Its backends are closed; the new group makes its
    own for the first array. Its node-shared arrays stay readable, but operations on them fail. The call uses
    MPIX_Comm_revoke and MPIX_Comm_shrink of ULFM.

    With `ranks_to_exclude`, as in c10d, only the other ranks call it, and no rank need have died. If none has, the old
    group and the groups made from it stay usable. If `group` is the world, the new group becomes the world for
    ``group=None``, and the old world ends with it: excluded ranks destroy the old world at their end if the others
    destroy the new one. If that raises RankFailedError there, they end without shrink_group.

    Parameters
    ----------
    ranks_to_exclude : list of int, optional
        Ranks of `group`. Default: the dead ranks. A ProcessGroup as first argument is taken as `group`.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    ProcessGroup
        It has the name, backends and timeout of `group`, but not its hooks.

    Raises
    ------
    UnsupportedOperationError
        Without `ranks_to_exclude`: the job does not survive dead ranks, because it was not started with
        ``mpirun --with-ft ulfm`` (Open MPI).
    ValueError
        `group` is a smaller group in a world with spares, or `ranks_to_exclude` is empty, contains this rank, or
        contains a rank that is not in `group`.
    DistError
        `group` has been destroyed or shrunk before; or, in a world with spares, some ranks call `replace_failed`
        instead (on every rank).

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
    if isinstance(ranks_to_exclude, ProcessGroup):
        ranks_to_exclude, group = None, ranks_to_exclude
    old = member_of("shrink_group", group)
    usable("shrink_group", old)
    if ranks_to_exclude is not None:
        return _without(old, checked_ranks("shrink_group", ranks_to_exclude, old))
    _check_that_mpi_survives("shrink_group")
    is_world = is_initialized() and old is current_world()
    if old.owner is not old and old.owner in failures.reserves:
        raise ValueError(
            f"shrink_group: {old!r} is a part of a world with spares: ranks that call replace_failed() there, and this "
            "one, would wait for each other. Call replace_failed(), and shrink_group() without a group where that "
            f"raises TooFewSparesError{on_rank()}"
        )
    if old in failures.reserves:
        _check_that_all_call("shrink_group", old)
    new = _of_survivors(old)
    if is_world:
        set_world(new)
    with failures.translating("shrink_group", new.comm):
        connect(new)
    return new


def replace_failed(group: ProcessGroup | None = None) -> ProcessGroup:
    """Make the world again after a :class:`RankFailedError`, with spares in the places of the dead ranks.

    Every surviving rank of the world calls it. A rank that still waits in a group for a dead rank gets a
    RankFailedError, and must then call it too. Several ranks, spares among them, may have died, also during the call.
    Spares wait in ``init_process_group(spares=...)``. On each replacement, `init_process_group` returns the new world,
    in which it has the rank of a dead one; the world's `is_replacement` is True there.

    The new world has the old world's size, and survivors keep their ranks: results that depend on rank and size do not
    change. ``group=None`` means the new world from now on. Groups, grids, node-shared arrays and persistent operations
    of the old world refuse every operation. All ranks make them again, by the same calls in the same order. The state
    of dead ranks is lost: load it from a checkpoint.

    Operations in flight in the old world end with RankFailedError. Its backends are closed; the new world makes its own
    for the first array.

    Parameters
    ----------
    group : ProcessGroup, optional
        The world, which is the default.

    Returns
    -------
    ProcessGroup
        The new world. It has the name, backends and timeout of the old one, but not its hooks.

    Raises
    ------
    TooFewSparesError
        More ranks have died than spares are left, or the world has no spares (on every rank). The world stays the same,
        for :func:`shrink_group`; remaining spares wait for the next call.
    UnsupportedOperationError
        The job does not survive dead ranks: it was not started with ``mpirun --with-ft ulfm`` (Open MPI).
    ValueError
        `group` is not the world.
    DistError
        `group` was destroyed, shrunk or replaced before, or some ranks call `shrink_group` instead (on every rank).

    Examples
    --------
    >>> def run(world):  # with all groups that it needs
    ...     hc.barrier(hc.new_group())
    >>> world = hc.GroupMember.WORLD  # from init_process_group(spares=2) on 6 ranks
    >>> try:
    ...     run(world)
    ... except hc.RankFailedError:
    ...     world = hc.replace_failed(world)
    ...     run(world)
    >>> world.size  # 4
    1
    """
    old = member_of("replace_failed", group)
    usable("replace_failed", old)
    _check_that_mpi_survives("replace_failed")
    if old is not current_world():
        raise ValueError(f"replace_failed: {old!r} is not the world; give the world, or nothing{on_rank()}")
    if (reserve := failures.reserves.get(old)) is None:
        raise TooFewSparesError(
            "the world was made without spares (init_process_group(spares=2) has two); shrink_group() makes a group of "
            f"the ranks that are left{on_rank()}",
            "replace_failed",
        )

    def make(fields: dict[str, Any]) -> ProcessGroup:
        fields["place"] = old.place.without_the_dead(fields["comm"], fields["nodes"])
        return make_group(**{**fields_of(old), "ranks": (), **fields})

    _check_that_all_call("replace_failed", old)
    new = cast("ProcessGroup", reserve.fill(old.rank, old.size, make))  # only a spare may get none
    _abandon(old, reserve.replaced, "replaced", "replace_failed")
    old.successor, failures.reserves[new] = new, reserve
    count_names_anew()
    set_world(new)
    with failures.translating("replace_failed", new.comm):
        connect(new)
    return new


def agree(flag: bool, group: Group | None = None) -> bool:
    """Return True on every rank if `flag` is true on all living ranks of `group`: MPIX_Comm_agree of ULFM.

    Every living rank calls it. Under ``mpirun --with-ft ulfm`` (Open MPI) it acknowledges failures first, so it works
    in a group that has lost ranks, and even while ranks die. In other jobs it is an ordinary reduction.

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


def _check_that_mpi_survives(operation: str) -> None:
    if not failures.is_on():
        raise UnsupportedOperationError(
            f"{operation}: this job does not survive dead ranks; {failures.HOW_TO_START}{on_rank()}"
        )


def _check_that_all_call(operation: str, world: ProcessGroup) -> None:
    """Raise on every rank if some call shrink_group and others replace_failed, because both calls would hang."""
    failures.revoke(world.comm)  # wakes ranks that still wait in other operations
    shrinks = operation == "shrink_group"
    all_shrink, all_fill = (failures.agree(world.comm, vote) for vote in (shrinks, not shrinks))
    if not (all_shrink or all_fill):
        other = "replace_failed" if shrinks else "shrink_group"
        raise DistError(
            f"other ranks call {other}; call the same on every rank: replace_failed(), and shrink_group() where that "
            f"raises TooFewSparesError{on_rank()}",
            operation,
        )


def _of_survivors(old: ProcessGroup) -> ProcessGroup:
    """Make a group of the living ranks of `old`, and abandon `old`; each living rank calls it."""
    made: list[ProcessGroup] = []

    def make(comm: Any, members: list[int]) -> None:
        if made:
            made.pop().give_up((), "has never been used, because another rank has died meanwhile")
        made.append(_world(old, comm, members) if old.owner is old else _child(old, comm, members, is_duplicated=True))

    failures.shrink(old.comm, make)
    (new,) = made
    dead = {*old.ranks} - {*(old.ranks[rank] for rank in failures.ranks_in(old.comm, new.comm))}
    _abandon(old, tuple(sorted(dead)), "shrunk", "shrink_group")
    if old in failures.reserves:
        failures.reserves[new] = failures.reserves[old]
    old.successor = new
    return new


def _child(old: ProcessGroup, comm: Any, members: list[int], is_duplicated: bool = False) -> ProcessGroup:
    """Make a group of some ranks of `old`, in its world; each of them calls it."""
    ranks, limits = [old.ranks[rank] for rank in members], {"timeout": old.timeout, "on_timeout": old.on_timeout}
    return child_of(old.owner, comm, ranks, old.config, limits, old.name, old.description, is_duplicated)


def _world(old: ProcessGroup, comm: Any, members: list[int]) -> ProcessGroup:
    """Make a world of some ranks of the world `old`; each of them calls it."""
    mpi_library.private(comm).Set_name(f"hpccomm {old.name}")
    nodes = tuple(old.nodes[rank] for rank in members)
    fields = {"rank": comm.Get_rank(), "size": len(members), "ranks": (), "comm": comm, "nodes": nodes}
    with failures.translating("shrink_group", comm):
        return make_group(**{**fields_of(old), **fields, "place": old.place.without_the_dead(comm, nodes)})


def _without(old: ProcessGroup, excluded: list[int]) -> ProcessGroup:
    """Make a group of the ranks of `old` that are not `excluded`; each of its ranks calls it."""
    if old.rank in excluded:
        raise ValueError(f"shrink_group: ranks_to_exclude is {excluded}: only the ranks that stay call it{on_rank()}")
    if old.owner in failures.reserves:
        raise ValueError(f"shrink_group: a world with spares keeps its ranks; make a group by new_group{on_rank()}")
    members = [rank for rank in range(old.size) if rank not in excluded]
    comm = create_group("shrink_group", old, members)
    if old.owner is not old or not is_initialized() or old is not current_world():
        return _child(old, comm, members)
    failures.watch(comm, None)
    failures.keep_spare(comm)
    new = _world(old, comm, members)
    old.on_destroy, new.shrunk_from, old.successor = None, old, new
    set_world(new)
    connect(new)
    return new


def _abandon(old: ProcessGroup, dead: tuple[int, ...], what: str, function: str) -> None:
    """Give up a group that `function` replaces, and all groups made from it if it is a world."""
    reason = f"because ranks {abridged(dead)} have died" if dead else "although nobody has died"
    if old.owner is old:
        old.on_destroy = None
        for child in list(old.children):
            child.give_up(dead, f"was made from a group that has been {what}, {reason}; make it again")
    old.give_up(dead, f"has been {what}, {reason}; go on with what {function} returned")
    if (larger := old.shrunk_from) is not None:
        _abandon(larger, failures.dead_members(larger.comm), what, function)

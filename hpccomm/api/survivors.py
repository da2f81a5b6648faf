"""Going on without ranks that have died, or with spares in their places: what the survivors call.

The world that comes of it is a new one, and the program makes its groups again. After shrink_group global ranks are
counted anew, and groups that changed their ranks under its hands would be wrong in silence; after replace_failed some
ranks are other processes, which know of no group. `agree` bypasses the dispatcher, because it works in failed groups. A
failed communicator is not freed: MPI may still hold messages for it.
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
from .world import connect, current_world, is_initialized, member, member_of, replace_world


@c10d_names("shrink_flags", only_none=("pg_options",))
def shrink_group(
    ranks_to_exclude: Sequence[Integer] | ProcessGroup | None = None, group: ProcessGroup | None = None
) -> ProcessGroup:
    """Make a group of the ranks of `group` that are alive, to go on with after a :class:`RankFailedError`.

    With `ranks_to_exclude`, as in c10d, the group is that of the other ranks, and only these call it. Nobody has died:
    the old group and those made from it stay as they are. If `group` is the world, ``group=None`` means the new one
    from here on, and the old one ends with it: the ranks that were excluded destroy it at their end, if the others do.
    The rest of this text is about ranks that have died.

    Every surviving rank of `group` calls it. Those that still wait in `group` for a rank that does not come are woken
    by a RankFailedError, and have to call it too. Several ranks may have died, also during the call.

    The world is replaced: ``group=None`` means the new one from here on. Ranks are counted anew from 0, in their old
    order, and `get_rank` returns the new one. Groups made from the old world refuse every operation: make them again.
    A smaller group is replaced in its world, which stays as it is, and so do the global ranks; not in a world with
    spares, which are for the whole of it.

    Operations in flight in the old group end with RankFailedError. Its backends are closed, and made again when the
    first array comes along. Its node-shared arrays stay readable, but their operations don't work. The call stands for
    MPIX_Comm_revoke and MPIX_Comm_shrink of ULFM.

    Parameters
    ----------
    ranks_to_exclude : list of int, optional
        Ranks of `group`. Default: those that have died. A group in this place is taken for `group`.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    ProcessGroup
        With the name, the backends and the timeout of `group`, but not its hooks.

    Raises
    ------
    UnsupportedOperationError
        Without `ranks_to_exclude`: the job does not survive dead ranks, because it was not started with
        ``mpirun --with-ft ulfm`` (Open MPI).
    ValueError
        `group` is a smaller group in a world with spares; or this rank is one of `ranks_to_exclude`, which are none, or
        no ranks of `group`.
    DistError
        `group` has been destroyed or shrunk before. In a world with spares, on every rank: some ranks call
        `replace_failed` instead.

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
        replace_world(new)
    with failures.translating("shrink_group", new.comm):
        connect(new)
    return new


def replace_failed(group: ProcessGroup | None = None) -> ProcessGroup:
    """Make the world again with spares in the places of the ranks that have died, after a :class:`RankFailedError`.

    Every surviving rank of the world calls it. Those that still wait in a group for a rank that does not come are woken
    by a RankFailedError, and have to call it too. Several ranks may have died, also during the call, spares among them.
    The spares are those of ``init_process_group(spares=...)``, which returns on each that is called, with the rank of
    a dead one and this world; its `is_replacement` is True.

    The new world has the old one's size, and survivors keep their ranks: what depends on rank and size stays as it is.
    ``group=None`` means the new world from here on. Groups, grids, node-shared arrays and persistent operations of the
    old one refuse every operation. Make them again, all ranks by the same calls in the same order: they are the same
    groups then. The state of the dead is lost: load it from a checkpoint.

    Operations in flight in the old world end with RankFailedError. Its backends are closed, and made again when the
    first array comes along.

    Parameters
    ----------
    group : ProcessGroup, optional
        The world, which is the default.

    Returns
    -------
    ProcessGroup
        The new world, with the name, the backends and the timeout of the old one, but not its hooks.

    Raises
    ------
    TooFewSparesError
        More ranks have died than spares are left, or there have never been any; on every rank. The world stays as it
        is, for :func:`shrink_group`; spares that are left wait for the next call.
    UnsupportedOperationError
        The job does not survive dead ranks: it was not started with ``mpirun --with-ft ulfm`` (Open MPI).
    ValueError
        `group` is not the world.
    DistError
        `group` has been destroyed, shrunk or replaced before. On every rank: some ranks call `shrink_group` instead.

    Examples
    --------
    >>> def run(world):  # with all groups that it needs
    ...     hc.barrier(hc.new_group())
    >>> world = hc.GroupMember.WORLD  # what init_process_group(spares=2) returned on 6 ranks
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
    replace_world(new)
    with failures.translating("replace_failed", new.comm):
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


def _check_that_mpi_survives(operation: str) -> None:
    if not failures.is_on():
        raise UnsupportedOperationError(
            f"{operation}: this job does not survive dead ranks; {failures.HOW_TO_START}{on_rank()}"
        )


def _check_that_all_call(operation: str, world: ProcessGroup) -> None:
    """Raise on every rank if some shrink a world and others fill it: they would wait for each other for ever."""
    failures.revoke(world.comm)  # wakes those who call neither yet
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
    """Make the group of those ranks of `old` that live, and abandon `old`; each of them calls it."""
    comm, members = failures.shrink(old.comm)
    owner = old.owner
    ranks = tuple(old.ranks[rank] for rank in members)
    dead = tuple(rank for rank in old.ranks if rank not in ranks)
    limits = {"timeout": old.timeout, "on_timeout": old.on_timeout}
    if owner is old:
        mpi_library.private(comm).Set_name(f"hpccomm {old.name}")
        nodes = tuple(old.nodes[rank] for rank in members)
        fields = fields_of(old)
        fields |= {"rank": comm.Get_rank(), "size": len(members), "ranks": (), "comm": comm, "nodes": nodes}
        with failures.translating("shrink_group", comm):
            fields["place"] = old.place.without_the_dead(comm, nodes)
    _abandon(old, dead, "shrunk", "shrink_group")
    if owner is old:
        new = make_group(**fields)
        if old in failures.reserves:
            failures.reserves[new] = failures.reserves[old]
    else:
        new = child_of(owner, comm, ranks, old.config, limits, old.name, old.description, is_duplicated=True)
    old.successor = new
    return new


def _without(old: ProcessGroup, excluded: list[int]) -> ProcessGroup:
    """Make a group of the ranks of `old` that are not `excluded`; each of them calls it."""
    if old.rank in excluded:
        raise ValueError(f"shrink_group: ranks_to_exclude is {excluded}: only the ranks that stay call it{on_rank()}")
    if old.owner in failures.reserves:
        raise ValueError(f"shrink_group: a world with spares keeps its ranks; make a group by new_group{on_rank()}")
    members = [rank for rank in range(old.size) if rank not in excluded]
    comm = create_group("shrink_group", old, members)
    if old.owner is not old or not is_initialized() or old is not current_world():
        ranks, limits = [old.ranks[rank] for rank in members], {"timeout": old.timeout, "on_timeout": old.on_timeout}
        return child_of(old.owner, comm, ranks, old.config, limits, old.name, old.description)
    mpi_library.private(comm).Set_name(f"hpccomm {old.name}")
    failures.keep_spare(comm)
    nodes = tuple(old.nodes[rank] for rank in members)
    fields = {"rank": comm.Get_rank(), "size": len(members), "ranks": (), "comm": comm, "nodes": nodes}
    with failures.translating("shrink_group", comm):
        new = make_group(**{**fields_of(old), **fields, "place": old.place.without_the_dead(comm, nodes)})
    old.on_destroy, new.shrunk_from = None, old
    replace_world(new)
    connect(new)
    return new


def _abandon(old: ProcessGroup, dead: tuple[int, ...], what: str, function: str) -> None:
    """Give up a group, and, if it is a world, those made from it, for another one that `function` returns."""
    reason = f"because ranks {abridged(dead)} have died" if dead else "although nobody has died"
    if old.owner is old:
        old.on_destroy = None
        for child in list(old.children):
            child.give_up(dead, f"was made from a group that has been {what}, {reason}; make it again")
    old.give_up(dead, f"has been {what}, {reason}; go on with what {function} returned")

"""ProcessGroup.nccl_config: collectives with an ncclCollConfig_t of NCCL 2.31."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.nccl import libnccl

from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
pytestmark = pytest.mark.usefixtures("no_world_left")
GPU = {"device_id": gpus.own()}


@pytest.fixture
def machine(machine: Any) -> Any:
    machine.version = 23100
    return machine


def configured(machine: Any) -> list[str]:
    """Return the settings of the calls since the last look."""
    found = [call.removeprefix("configured ") for call in machine.calls if call.startswith("configured")]
    machine.calls.clear()
    return found


def rank_plus_one(*shape: int) -> Any:
    return gpus.array(np.full(shape, RANK + 1.0))


@pytest.mark.parametrize("on_timeout", ["abort", "raise"])
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_of_the_block_have_the_settings(machine: Any, on_timeout: str, async_op: bool) -> None:
    with hc.init_process_group(on_timeout=on_timeout, **GPU) as group:
        array, total = rank_plus_one(4), SIZE * (SIZE + 1) / 2
        hc.all_reduce(array)  # and on the short way from now on
        assert configured(machine) == []
        with group.nccl_config(max_ctas=4, alg_selection="ring", force_alg_selection=False):
            work = hc.all_reduce(array, async_op=async_op)
            assert work is None or work.wait()
        whole = "{'max_ctas': 4, 'alg_selection': b'ring', 'force_alg_selection': "
        (told,) = configured(machine)
        assert told.startswith(whole)
        hc.all_reduce(array)
        assert configured(machine) == []
        np.testing.assert_array_equal(gpus.values(array), np.full(4, total * SIZE**2))


def test_every_collective_takes_them_and_no_message(machine: Any) -> None:
    root = 0
    with hc.init_process_group(**GPU) as group, group.nccl_config(min_ctas=2):
        array, many = rank_plus_one(2), rank_plus_one(2 * SIZE)
        out, gathered, strided = gpus.array(np.zeros(2)), gpus.array(np.zeros(2 * SIZE)), rank_plus_one(4)[::2]
        configured(machine)
        for call in (
            lambda: hc.all_reduce(array),
            lambda: hc.all_reduce(strided),
            lambda: hc.all_reduce(array, hc.ReduceOp.AVG),
            lambda: hc.broadcast(array, root),
            lambda: hc.reduce(array, root),
            lambda: hc.all_gather_single(gathered, array),
            lambda: hc.reduce_scatter_single(out, many),
            lambda: hc.all_to_all_single(gathered, many),
            hc.barrier,
        ):
            call()
            if call is not hc.barrier:  # of MPI
                assert configured(machine) == ["{'min_ctas': 2}"]
        configured(machine)
        if SIZE > 1:
            hc.sendrecv(array, (RANK + 1) % SIZE, out, (RANK - 1) % SIZE)
            assert configured(machine) == []
            sizes = [1 + (RANK + rank) % 2 for rank in range(SIZE)]
            hc.all_to_all([gpus.array(np.zeros(size)) for size in sizes], [rank_plus_one(size) for size in sizes])
            assert configured(machine) == []


def test_a_persistent_operation_keeps_them_and_blocks_nest(machine: Any) -> None:
    with hc.init_process_group(**GPU) as group:
        array = rank_plus_one(2)
        with group.nccl_config(cta_policy=1):
            with group.nccl_config(user_profiler_tag=7, nvls_ctas=1, cga_cluster_size=2):
                step = hc.all_reduce_init(array)
                hc.all_reduce(array)
            hc.all_reduce(array)
        inner, outer = configured(machine)
        assert all(each in inner for each in ("'nvls_ctas': 1", "'cga_cluster_size': 2", "'user_profiler_tag': 7"))
        assert "cta_policy" not in inner
        assert outer == "{'cta_policy': 1}"
        step.start()
        step.wait()
        assert configured(machine) == [inner]
        step.free()


def test_other_groups_and_what_follows_an_error_are_as_before(machine: Any) -> None:
    with hc.init_process_group(**GPU) as group, hc.new_group() as other:
        array = rank_plus_one(2)
        with group.nccl_config(max_ctas=1):
            hc.all_reduce(array, group=other)
            with pytest.raises(ValueError, match="not in the group"):
                hc.broadcast(array, SIZE)
        hc.all_reduce(array)
        assert configured(machine) == []
        with contextlib.suppress(ZeroDivisionError), group.nccl_config(max_ctas=1):
            raise ZeroDivisionError
        hc.all_reduce(array)
        assert configured(machine) == []


def test_the_ranks_have_to_be_connected_and_a_group_may_end_in_a_block(machine: Any) -> None:
    with hc.init_process_group() as group:
        text = r"^nccl_config: the ranks of the group are not connected by NCCL yet"
        with pytest.raises(hc.DistError, match=text), group.nccl_config(max_ctas=1):
            pass
        hc.all_reduce(rank_plus_one(2))
        with group.nccl_config(max_ctas=1):
            assert group.nccl_handle > 0
            group.dispatcher.backends["cuda"].abort()
            with pytest.raises(hc.DistBackendError, match="the program has aborted"):
                hc.all_reduce(rank_plus_one(2))


def test_an_older_nccl_is_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.version = 23000
    with hc.init_process_group(**GPU) as group:
        if gpus.IS_BINDINGS:
            library = group.dispatcher.backends["cuda"].nccl.library
            monkeypatch.delitem(library, "ncclAllReduceConfig")
        text = r"^this version of NCCL does not have ncclAllReduceConfig; install a newer one"
        with pytest.raises(hc.DistBackendError, match=text), group.nccl_config(max_ctas=1):
            pass
        hc.all_reduce(rank_plus_one(2))


def test_what_is_refused(machine: Any) -> None:
    with hc.init_process_group("cpu:mpi,cuda:mpi") as group:
        text = r"^nccl_config: backend 'mpi' does not have it, NCCL has: .*'cpu:mpi,cuda:nccl'"
        with pytest.raises(hc.UnsupportedOperationError, match=text), group.nccl_config(max_ctas=1):
            pass
        with pytest.raises(TypeError, match="max_cta"), group.nccl_config(max_cta=1):  # type: ignore[call-arg]
            pass


def test_the_structure_is_that_of_nccl4py() -> None:
    pytest.importorskip("nccl.bindings")
    from nccl.bindings import nccl

    theirs, ours = nccl.coll_config_dtype, libnccl.CollConfig
    names = [name for name, _ in ours._fields_]
    offsets = {name.strip("_"): theirs.fields[name][1] for name in theirs.names}
    assert [getattr(ours, name).offset for name in names] == [offsets[name] for name in names]
    assert [theirs.names.index("size_"), ctypes.sizeof(ours)] == [0, offsets["user_profiler_tag"] + 8]
    unset, made = nccl.CollConfig(), ours()
    for name in names[2:]:
        told = getattr(unset, name)
        if name not in ("version", "ext", "alg_selection"):
            assert getattr(made, name) == told, name
    assert (made.magic, made.ext, made.alg_selection) == (unset.magic, None, None)
    assert not unset.ext
    assert not unset.alg_selection

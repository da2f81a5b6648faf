"""What programs for torch.distributed write: names, keywords and defaults of c10d's."""

from __future__ import annotations

import inspect
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.c10d_names import c10d_names

from .launch import ROOT, launch

pytestmark = pytest.mark.usefixtures("process_group")

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
TOTAL = SIZE * (SIZE + 1) / 2


def mine(n: int = 2) -> Any:
    return np.full(n, RANK + 1.0)


# What torch.distributed exports, 2.13 and 2.14 together.
NAMES = """
all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
all_reduce_coalesced all_to_all all_to_all_single AllreduceCoalescedOptions AllreduceOptions AllToAllOptions Backend
BackendConfig barrier BarrierOptions batch_isend_irecv broadcast broadcast_object_list BroadcastOptions DebugLevel
default_pg_timeout destroy_process_group gather gather_into_tensor gather_object gather_single GatherOptions
get_backend get_backend_config get_backend_impl get_debug_level get_default_backend_for_device get_global_rank
get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank get_world_size group GroupMember
GroupName init_process_group irecv is_backend_available is_gloo_available is_initialized is_mpi_available
is_nccl_available is_torchelastic_launched is_ucc_available is_xccl_available isend monitored_barrier new_group
new_subgroups new_subgroups_by_enumeration P2POp PrefixStore ProcessGroup ProcessGroupGloo ProcessGroupNCCL
ProcessGroupNCCL2 ProcessGroupNCCLLazy record_comm recv recv_object_list reduce reduce_op reduce_scatter
reduce_scatter_single reduce_scatter_tensor ReduceOp ReduceOptions ReduceScatterOptions scatter scatter_object_list
ScatterOptions send send_object_list set_timeout shrink_group split_group Store supports_complex Work
"""
EXPORTED = NAMES.split()

ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (other|not) \| (.*)\|$", re.M)


# -- the table of the documentation --------------------------------------------------------------------


def table() -> dict[str, tuple[str, str]]:
    """The names in the rows of "Names that differ": other or not, and the remark."""
    page = (ROOT / "docs" / "how-to" / "from-torch.md").read_text(encoding="utf-8")
    section = page.partition("## Names that differ")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    return {name: (state, said.strip()) for names, state, said in rows for name in re.findall(r"\w+", names)}


def test_names_of_torch_that_hpccomm_lacks_have_rows_with_reasons() -> None:
    rows = table()
    assert sorted(rows) == sorted(name for name in EXPORTED if not hasattr(hc, name))
    for name, (_, said) in rows.items():
        assert said, f"the row of {name} does not say why"


def test_the_list_of_names_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch.distributed", reason="there is no PyTorch to compare with")
    assert not set(torch.distributed_c10d.__all__) - set(EXPORTED)


# The arguments of c10d's functions in torch 2.14, in their order.
ARGUMENTS = """
all_gather: tensor_list tensor group async_op
all_gather_coalesced: output_tensor_lists input_tensor_list group async_op
all_gather_into_tensor: output_tensor input_tensor group async_op
all_gather_object: object_list obj group weights_only
all_reduce: tensor op group async_op
all_reduce_coalesced: tensors op group async_op
all_to_all: output_tensor_list input_tensor_list group async_op
all_to_all_single: output input output_split_sizes input_split_sizes group async_op
barrier: group async_op device_ids timeout
batch_isend_irecv: p2p_op_list
broadcast: tensor src group async_op group_src
broadcast_object_list: object_list src group device group_src weights_only
destroy_process_group: group
gather: tensor gather_list dst group async_op group_dst
gather_object: obj object_gather_list dst group group_dst weights_only
get_backend: group
get_backend_config: group
get_global_rank: group group_rank
get_group_rank: group global_rank
get_node_local_rank: fallback_rank
get_process_group_ranks: group
get_rank: group
get_world_size: group
init_process_group: backend init_method timeout world_size rank store group_name pg_options device_id
irecv: tensor src group tag group_src
isend: tensor dst group tag group_dst
monitored_barrier: group timeout wait_all_ranks
new_group: ranks timeout backend pg_options use_local_synchronization group_desc device_id sort_ranks
new_subgroups: group_size group timeout backend pg_options group_desc
new_subgroups_by_enumeration: ranks_per_subgroup_list timeout backend pg_options group_desc
P2POp: op tensor peer group tag group_peer
recv: tensor src group tag group_src
recv_object_list: object_list src group device group_src use_batch weights_only
reduce: tensor dst op group async_op group_dst
reduce_scatter: output input_list op group async_op
reduce_scatter_tensor: output input op group async_op
scatter: tensor scatter_list src group async_op group_src
scatter_object_list: scatter_object_output_list scatter_object_input_list src group group_src weights_only
send: tensor dst group tag group_dst
send_object_list: object_list dst group device group_dst use_batch weights_only
shrink_group: ranks_to_exclude group shrink_flags pg_options
split_group: parent_pg split_ranks timeout pg_options group_desc backend
"""
ARGUMENTS_OF = {name: words.split() for name, words in (line.split(":") for line in ARGUMENTS.strip().splitlines())}
SAME = {  # ours, and c10d's
    ("array", "tensor"),
    ("arrays", "tensors"),
    ("array", "input_tensor"),
    ("arrays", "input_tensor_list"),
    ("output", "tensor"),
    ("output", "output_tensor"),
    ("input", "input_tensor"),
    ("output_list", "tensor_list"),
    ("output_list", "output_tensor_list"),
    ("output_lists", "output_tensor_lists"),
    ("input_list", "input_tensor_list"),
    ("parent", "parent_pg"),
    ("color", "split_ranks"),  # which is understood in its place
}


@pytest.mark.parametrize("name", ARGUMENTS_OF)
def test_no_argument_of_c10ds_is_taken_for_another_one(name: str) -> None:
    parameters = inspect.signature(getattr(hc, name)).parameters.values()
    ours = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    for own, theirs in zip(ours, ARGUMENTS_OF[name]):
        assert own == theirs or (own, theirs) in SAME, f"{name}: keyword-only from {own} on: c10d's is {theirs}"
    assert "async_op" not in ours[len(ARGUMENTS_OF[name]) :], f"{name}: c10d may add others"


def test_every_function_that_c10d_has_too_is_in_the_table() -> None:
    functions = [name for name in EXPORTED if inspect.isfunction(getattr(hc, name, None))]
    without = {name for name in functions if not inspect.signature(getattr(hc, name)).parameters}
    assert set(functions) - without - ARGUMENTS_OF.keys() <= {
        *("all_gather_single", "reduce_scatter_single", "is_backend_available")
    }


def test_the_table_of_arguments_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch.distributed", reason="there is no PyTorch to compare with")
    for name, arguments in ARGUMENTS_OF.items():
        theirs = [each for each in inspect.signature(getattr(torch, name)).parameters if not each.startswith("_")]
        assert theirs[: len(arguments)] == arguments[: len(theirs)], name  # an older one has fewer


@pytest.mark.parametrize(
    "call",
    [
        lambda: hc.new_group([0], None, None, None, False, "mine"),
        lambda: hc.new_subgroups(1, None, None, None, None, "mine"),
        lambda: hc.broadcast_object_list([1], 0, None, "cpu"),
        lambda: hc.send_object_list([1], 0, None, "cpu"),
        lambda: hc.all_gather_object([None] * SIZE, 1, None, True),
        lambda: hc.split_group(None, [[0]], timedelta(seconds=60)),
    ],
)
def test_arguments_in_c10ds_order_are_refused_where_ours_differs(call: Any) -> None:
    with pytest.raises(TypeError, match=r"takes from \d to \d positional arguments"):
        call()


def test_weights_only_is_accepted_if_it_is_off() -> None:
    objects = [None] * SIZE
    hc.all_gather_object(objects, RANK, weights_only=False)  # type: ignore[call-arg]
    assert objects == list(range(SIZE))
    with pytest.raises(ValueError, match="all_gather_object: hpccomm has no weights_only; leave it out"):
        hc.all_gather_object(objects, RANK, weights_only=True)  # type: ignore[call-arg]


# -- barrier -----------------------------------------------------------------------------------------


def test_barrier_takes_a_timeout_and_device_ids() -> None:
    assert hc.barrier(device_ids=[RANK]) is None
    assert hc.barrier(timeout=timedelta(minutes=1), device_ids=None) is None
    work = hc.barrier(async_op=True, timeout=60)
    assert work is not None
    assert work.wait()
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="barrier: timeout is"):
            hc.barrier(timeout=bad)
    with pytest.raises(TypeError, match="barrier: timeout is 'x'"):
        hc.barrier(timeout="x")  # type: ignore[arg-type]


def test_a_barrier_says_that_somebody_is_missing() -> None:
    if SIZE == 1:
        return
    group = hc.new_group()
    if RANK == 0:
        with pytest.raises(hc.DistTimeoutError, match=r"barrier #1: not done after 0.1 s; it is still in flight"):
            hc.barrier(group, timeout=0.1)
        hc.barrier()
    else:
        hc.barrier()
        hc.barrier(group, timeout=60)
    hc.destroy_process_group(group)


# -- names -------------------------------------------------------------------------------------------


def test_names_of_groups(process_group: hc.ProcessGroup) -> None:
    assert hc.group.WORLD is hc.GroupMember.WORLD is process_group
    group = hc.new_group(group_desc="mine")
    assert isinstance(group, hc.ProcessGroup)
    assert (group.group_name, group.group_desc) == ("mine", "mine") == (group.name, group.description)
    hc.destroy_process_group(group)


def test_rank_and_size_are_plain_numbers(process_group: hc.ProcessGroup) -> None:
    """An int that can be called as well would not be weak: NumPy makes float64 of float32 divided by it."""
    third = np.ones(3, np.float32) / process_group.size + process_group.rank
    assert third.dtype == np.float32
    assert type(hc.get_world_size()) is type(process_group.size) is type(process_group.rank) is int


def test_names_of_backends() -> None:
    assert (hc.Backend.MPI, hc.Backend.GLOO, hc.Backend.NCCL) == ("mpi", "gloo", "nccl")
    assert hc.is_backend_available(backend=hc.Backend.MPI)

    class Named(hc.Backend):
        def __init__(self, title: str) -> None:
            super().__init__(0, 1)
            self.title = title

    assert Named("GLOO").title == "GLOO"


def test_the_local_rank(process_group: hc.ProcessGroup) -> None:
    assert hc.get_node_local_rank() == hc.get_node_local_rank(fallback_rank=77) == process_group.local_rank


def test_reductions_of_torch() -> None:
    torch = pytest.importorskip("torch.distributed", reason="there is no PyTorch")
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        x, expected = mine(), mine()
        hc.all_reduce(x, getattr(torch.ReduceOp, name))
        hc.all_reduce(expected, name)
        assert (x == expected).all()
    x = mine()
    hc.all_reduce(x, torch.ReduceOp(torch.ReduceOp.MAX))
    assert (x == SIZE).all()
    with pytest.raises(TypeError, match=r"all_reduce: op is .*PREMUL_SUM.*write ReduceOp.PREMUL_SUM\(factor\)"):
        hc.all_reduce(mine(), torch.ReduceOp.PREMUL_SUM)


def test_a_model_of_torch_is_trained_by_gradient_buckets(process_group: hc.ProcessGroup) -> None:
    torch = pytest.importorskip("torch", reason="there is no PyTorch")
    torch.manual_seed(0)
    x = torch.randn(4 * SIZE, 3)
    y = x.sum(1, keepdim=True)
    mine = slice(4 * RANK, 4 * RANK + 4)
    weights = []
    for together in (True, False):  # the ranks with a part each; one process with everything
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        params = list(model.parameters())
        buckets = hc.GradientBuckets(params)
        if together:
            for i, (p, view) in enumerate(zip(params, buckets.arrays)):
                p.grad = torch.from_numpy(view)
                p.register_post_accumulate_grad_hook(lambda p, i=i, b=buckets: b.ready(i, p.grad))
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            part = mine if together else slice(None)
            torch.nn.functional.mse_loss(model(x[part]), y[part]).backward()
            if together:
                buckets.wait()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.allclose(*weights, atol=1e-6)


def test_a_gradient_that_is_not_in_the_buckets_is_noticed() -> None:
    buckets = hc.GradientBuckets([np.zeros(3), np.zeros(0)])
    with pytest.raises(hc.DistError, match=r"array is not arrays\[0\] but a copy.*set_to_none=False"):
        buckets.ready(0, np.ones(3))
    buckets.arrays[0][:] = mine(3)
    buckets.ready(0, buckets.arrays[0][1:])
    buckets.ready(1, buckets.arrays[1])
    buckets.wait()
    np.testing.assert_allclose(buckets.arrays[0], [TOTAL / SIZE] * 3)


# -- keywords ----------------------------------------------------------------------------------------


def test_keywords_of_one_array() -> None:
    x = mine()
    hc.all_reduce(tensor=x, op=hc.ReduceOp.SUM)
    assert (x == TOTAL).all()
    x = mine()
    hc.broadcast(tensor=x, src=SIZE - 1)
    assert (x == SIZE).all()
    x = mine()
    hc.reduce(tensor=x, dst=0)
    assert (x == (TOTAL if RANK == 0 else RANK + 1)).all()


def test_keywords_of_one_array_from_or_to_each_rank() -> None:
    parts = [np.zeros(2) for _ in range(SIZE)]
    hc.all_gather(tensor_list=parts, tensor=mine())  # type: ignore[call-arg]
    assert [part[0] for part in parts] == list(range(1, SIZE + 1))
    for function in (hc.all_gather_into_tensor, hc.all_gather_single):
        whole = np.zeros(2 * SIZE)
        function(output_tensor=whole, input_tensor=mine())
        assert (whole == np.repeat(np.arange(1.0, SIZE + 1), 2)).all()
    gathered = [np.zeros(2) for _ in range(SIZE)] if RANK == 0 else None
    hc.gather(tensor=mine(), gather_list=gathered, dst=0)  # type: ignore[call-arg]
    assert gathered is None or [part[1] for part in gathered] == list(range(1, SIZE + 1))
    x = np.zeros(2)
    hc.scatter(tensor=x, scatter_list=parts if RANK == 0 else None, src=0)  # type: ignore[call-arg]
    assert (x == RANK + 1).all()
    received = [np.zeros(1) for _ in range(SIZE)]
    hc.all_to_all(output_tensor_list=received, input_tensor_list=[mine(1) for _ in range(SIZE)])  # type: ignore[call-arg]
    assert [part[0] for part in received] == list(range(1, SIZE + 1))


def test_keywords_of_many_arrays() -> None:
    arrays = [mine(2), mine(3)]
    hc.all_reduce_coalesced(tensors=arrays)  # type: ignore[call-arg]
    assert (np.concatenate(arrays) == TOTAL).all()
    lists = [[np.zeros(2), np.zeros(3)] for _ in range(SIZE)]
    hc.all_gather_coalesced(output_tensor_lists=lists, input_tensor_list=[mine(2), mine(3)])  # type: ignore[call-arg]
    assert [each[1][2] for each in lists] == list(range(1, SIZE + 1))


def test_keywords_of_messages() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    x = np.zeros(2)
    works: list[Any] = [hc.irecv(tensor=x, src=before), hc.isend(tensor=mine(), dst=after)]
    for work in works:
        work.wait()
    assert works[0]._source_rank() == before
    assert (x == before + 1).all()
    if SIZE > 1:
        y = np.zeros(2)
        if RANK == 0:
            hc.send(tensor=mine(), dst=1)
        elif RANK == 1:
            assert hc.recv(tensor=y, src=0) == 0
            assert (y == 1).all()
    z = np.zeros(2)
    pair = [hc.P2POp(hc.irecv, tensor=z, peer=before), hc.P2POp(op=hc.isend, tensor=mine(), peer=after)]
    for work in hc.batch_isend_irecv(p2p_op_list=pair):
        work.wait()
    assert (z == before + 1).all()


def test_an_argument_by_both_of_its_names_is_refused() -> None:
    x = mine()
    with pytest.raises(TypeError, match="all_reduce: array and tensor are one argument; give it once"):
        hc.all_reduce(x, tensor=x)
    with pytest.raises(TypeError, match="all_reduce_coalesced: arrays and tensors are one argument"):
        hc.all_reduce_coalesced(arrays=[x], tensors=[x])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values for argument 'arrays'"):
        hc.all_reduce_coalesced([x], tensors=[x])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="all_reduce: array is a NoneType; expected a NumPy"):
        hc.all_reduce()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'arrays'"):
        hc.all_reduce_coalesced()  # type: ignore[call-arg]
    assert (x == RANK + 1).all()


def test_the_order_of_the_arguments_of_init_is_c10ds() -> None:
    names = list(inspect.signature(hc.init_process_group).parameters)
    assert names[:7] == ["backend", "init_method", "timeout", "world_size", "rank", "store", "group_name"]


def test_a_function_with_c10ds_names_keeps_its_signature() -> None:
    assert list(inspect.signature(hc.all_gather).parameters) == ["output_list", "array", "group", "async_op"]

    @c10d_names("device", tensors="arrays")
    def count(arrays: list[int], by: int = 1) -> int:
        return by * len(arrays)

    assert count([1], 2) == count(by=2, tensors=[1], device=3) == count(arrays=[1], by=2) == 2  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'devices'"):
        count([1], devices=3)  # type: ignore[call-arg]


# -- arguments that mean nothing here -----------------------------------------------------------------


def test_device_and_use_batch_of_the_object_functions_are_ignored() -> None:
    slots = [RANK, "x"]
    hc.broadcast_object_list(slots, src=0, device="cuda:0")  # type: ignore[call-arg]
    assert slots == [0, "x"]
    if SIZE > 1 and RANK == 0:
        hc.send_object_list([1], dst=1, device=None, use_batch=True)  # type: ignore[call-arg]
    elif RANK == 1:
        hc.recv_object_list(slots[:1], src=0, device=None, use_batch=True)  # type: ignore[call-arg]


def test_options_of_torchs_backends_are_refused_but_for_their_defaults() -> None:
    group = hc.new_group(timeout=None, backend=None, pg_options=None, device_id=None)  # type: ignore[call-arg]
    hc.destroy_process_group(group)
    alone, _ = hc.new_subgroups(1, timeout=None, pg_options=None)  # type: ignore[call-arg]
    hc.destroy_process_group(alone)
    with pytest.raises(ValueError, match="new_group: hpccomm has no pg_options; leave it out, or None"):
        hc.new_group(pg_options="fast")  # type: ignore[call-arg]
    with pytest.raises(hc.DistError, match="there is a world group already"):
        hc.init_process_group(
            None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, pg_options=None, device_id=None
        )  # type: ignore[call-arg]


# -- shrink_group ------------------------------------------------------------------------------------

SHRINKS = """\
import sys
import numpy as np, hpccomm as hc

def total():
    for _ in range(20):
        x = np.full(2, hc.get_rank() + 1.0)
        hc.all_reduce(x)
    return x[0]

world = hc.init_process_group()
me = hc.get_rank()
pair = hc.new_group([0, 2])
assert total() == 6
if me == 1:
    for wrong in ([1], [0, 1]):
        try:
            hc.shrink_group(wrong)
        except ValueError as error:
            assert "only the ranks that stay call it (rank 1)" in str(error)
        else:
            raise AssertionError
else:
    small = hc.shrink_group([1])
    assert (hc.get_world_size(), hc.get_rank(), hc.group.WORLD) == (2, me // 2, small)
    assert total() == 3
    if hc.get_rank() == 0:
        small.store.set("key", b"value")
    assert small.store.get("key") == b"value"
    x = np.ones(1)
    hc.all_reduce(x, group=pair)
    again = hc.shrink_group(group=pair, ranks_to_exclude=[int(me == 0)], shrink_flags=0, pg_options=None)
    assert (x[0], again.size, hc.get_world_size()) == (2, 1, 2)
    hc.barrier()
    if me == 2:
        hc.shrink_group([0])
        assert (hc.get_world_size(), total()) == (1, 1)
if sys.argv[1] == "destroy":
    hc.destroy_process_group()
    assert not hc.is_initialized() and world.is_destroyed
    with hc.init_process_group() as world:
        if me == 1:
            hc.shrink_group([0, 2])
        else:
            hc.shrink_group([1])
    assert not hc.is_initialized() and world.is_destroyed
"""


@pytest.mark.serial
@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_a_group_without_some_ranks(end: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHRINKS, encoding="utf-8")
    done = launch(3, sys.executable, program, end)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "the list of ranks is empty"), ([SIZE], f"there is no rank {SIZE}"), ([0, 0], "listed twice")],
)
def test_ranks_that_can_not_be_excluded(ranks: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"shrink_group: .*{text}"):
        hc.shrink_group(ranks)


# -- split_group -------------------------------------------------------------------------------------


def test_split_group_by_lists_of_ranks(process_group: hc.ProcessGroup) -> None:
    rows = [list(range(SIZE))[::-1][: max(1, SIZE - 1)]]  # in descending order; rank 0 is in none of more than one
    for group in (
        hc.split_group(process_group, rows),  # type: ignore[arg-type]
        hc.split_group(parent_pg=process_group, split_ranks=rows, timeout=None, pg_options=None),  # type: ignore[call-arg]
    ):
        if RANK in rows[0]:
            assert group.ranks == tuple(rows[0])
            x = mine()
            hc.all_reduce(x, group=group)
            assert (x == sum(rank + 1 for rank in rows[0])).all()
        else:
            assert group == hc.GroupMember.NON_GROUP_MEMBER
        hc.destroy_process_group(group)


def test_the_lists_of_split_group_count_in_the_parent(process_group: hc.ProcessGroup) -> None:
    backwards = hc.new_group(list(range(SIZE))[::-1], sort_ranks=False)
    assert isinstance(backwards, hc.ProcessGroup)
    first = hc.split_group(backwards, split_ranks=[[0], list(range(1, SIZE))][: min(SIZE, 2)])
    assert first.ranks == ((SIZE - 1,) if RANK == SIZE - 1 else tuple(range(SIZE - 1))[::-1])
    hc.destroy_process_group(backwards)


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([[0], [0]], "split_group: a rank is listed twice"),
        ([[99]], "split_group: there is no rank 99"),
        ([], "split_group: the list of ranks is empty"),
    ],
)
def test_lists_of_split_group_that_make_no_sense(lists: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hc.split_group(split_ranks=lists)
    with pytest.raises(ValueError, match="both color and split_ranks are given"):
        hc.split_group(color=1, split_ranks=[[0]])
    for bad in ([0], 3, "ab"):
        with pytest.raises(TypeError, match=r"split_group: split_ranks is .*; expected a list of lists of ranks"):
            hc.split_group(split_ranks=bad)  # type: ignore[arg-type]


# -- outside of a group ------------------------------------------------------------------------------


def test_a_batch_of_a_rank_outside_the_group_has_nothing_to_wait_for() -> None:
    outside: Any = hc.NonMember((0,), "others")
    with pytest.warns(RuntimeWarning, match="this rank is not in"):
        works = hc.batch_isend_irecv([hc.P2POp(hc.isend, mine(), 0, group=outside)])
    for work in works:
        assert work.wait()

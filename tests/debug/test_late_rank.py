"""Whatever the ranks call, the watchdog sees who is late."""

from __future__ import annotations

import gc
import inspect
import json
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm import checkpoint
from hpccomm.debug import stacks
from hpccomm.debug.report import Reporter
from hpccomm.debug.watchdog import Watchdog
from hpccomm.job import failures

from ..launch import launch
from .late_rank import CALLS

pytestmark = pytest.mark.serial

# Classes of which nothing waits for other ranks, or whose methods are called by hpccomm and not by programs.
NOT_FOR_WAITING = {"Backend", "BackendOverMPI", "CompletedWork", "Hook", "NonMember", "Operation", "ReduceOp"}
NOT_FOR_WAITING |= {"Grid", "RemovableHandle"}
# They wait for a key, or for the process that holds the store, until a time-out of their own: tests/store has them.
STORES = {"FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"}
DOES_NOT_WAIT = {
    *(
        "block_slice",
        "device_of",
        "get_backend",
        "get_backend_config",
        "get_global_rank",
        "get_group_rank",
        "get_local_rank",
    ),
    *("get_local_size", "get_node_count", "get_node_local_rank", "get_node_rank", "get_process_group_ranks"),
    *("get_rank", "get_world_size", "is_available", "is_backend_available", "is_gloo_available", "is_initialized"),
    *("is_mpi_available", "is_nccl_available", "irecv", "isend", "peer_view", "recv_init", "register_backend"),
    *("register_device", "send_init", "send_object_list"),
    *("checkpoint.Checkpoint", "checkpoint.CheckpointError", "checkpoint.NoCheckpointError"),
    *("checkpoint.latest", "checkpoint.steps"),
    *("Future.add_done_callback", "Future.value", "GradientBuckets.ready"),
    *("PersistentWork.begin", "PersistentWork.block", "PersistentWork.fail", "PersistentWork.give_up"),
    *("PersistentWork.leave_to_the_parent",),
    *("PersistentWork.poll", "PersistentWork.refuse_to_start", "PersistentWork.release", "PersistentWork.start"),
    *("ProcessGroup.abort", "ProcessGroup.enable_timing", "ProcessGroup.give_up", "ProcessGroup.is_destroyed"),
    *("ProcessGroup.message_number", "ProcessGroup.nccl_config", "ProcessGroup.nccl_handle", "ProcessGroup.refusal"),
    *("ProcessGroup.describe", "ProcessGroup.register_hook", "ProcessGroup.sequence_number", "ProcessGroup.store"),
    *("Work.abort", "Work.add_done_callback", "Work.block", "Work.cancel", "Work.finish_with", "Work.get_duration"),
    *("Work.get_future", "Work.give_up", "Work.make_progress", "Work.poll", "Work.translate_error"),
    *("PersistentWork.belong_to", "PersistentWork.group", "ProcessGroup.agree_on", "Work.waits_on_stream"),
    *("Work.fail", "Work.group", "Work.has_ended", "Work.is_notified", "Work.op_type", "Work.sequence_number"),
    *("RankExecutor.map", "RankExecutor.num_workers", "RankExecutor.shutdown", "RankExecutor.starmap"),
    *("RankExecutor.submit", "coalescing.wait"),
}
SEEN_ELSEWHERE = {
    "init_process_group": "the test below",
    "checkpoint.save": "as load: it ends with a collective",
    "checkpoint.save_async": "as load",
    "checkpoint.finish": "all_gather_single, in a group of its own",
    "empty_symmetric": "it needs a GPU; as empty_shared, the ranks meet over MPI first",
    "shrink_group": "it needs dead ranks: tests/faults",
    "replace_failed": "likewise",
    "ProcessGroup.agree": "agree",
    "ProcessGroup.leave": "tests/faults: a rank at the end of its program",
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


def public_names() -> set[str]:
    """Return the functions and methods that programs call."""
    names = {f"checkpoint.{name}" for name in checkpoint.__all__}
    for name in hc.__all__:
        each = getattr(hc, name)
        if inspect.isclass(each):
            if not issubclass(each, BaseException) and name not in NOT_FOR_WAITING | STORES:
                methods = (method for method in vars(each) if not method.startswith("_"))
                kinds = (property, classmethod, staticmethod)
                names |= {f"{name}.{m}" for m in methods if callable(vars(each)[m]) or isinstance(vars(each)[m], kinds)}
        else:
            names.add(name)
    return names


def test_every_public_function_is_in_the_table() -> None:
    known = {name.partition(", ")[0] for name in CALLS} | DOES_NOT_WAIT | SEEN_ELSEWHERE.keys()
    assert sorted(public_names() - known) == [], "say in late_rank.py how it waits for other ranks, or here that not"
    assert sorted(known - public_names() - {"Future.result", "Work", "coalescing"}) == []  # inherited, and classes


def test_every_call_that_waits_for_a_late_rank_is_seen(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.debug.late_rank"]
    env = {"HPCCOMM_DEBUG_DIR": str(tmp_path), "HPCCOMM_TIMEOUT": "600"}
    finished = launch(2, *command, timeout=400, env=env)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("call", ["hc.init_process_group()", "hc.ProcessGroup.from_comm(MPI.COMM_WORLD)"])
def test_the_first_call_of_a_program(call: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, time, hpccomm as hc\n"
        "from mpi4py import MPI\n"
        "while MPI.COMM_WORLD.rank == 0:\n"
        "    time.sleep(0.05)\n"
        "    for file in pathlib.Path(sys.argv[1]).glob('run-*/ask'):\n"
        "        if (order := file.read_text()).startswith('end at '):\n"
        "            from hpccomm.debug.watchdog import _end_at\n"
        "            _end_at(float(order.removeprefix('end at ')))\n"
        f"{call}\n"
    )
    env = {"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports"), "HPCCOMM_TIMEOUT": "2"}
    finished = launch(2, sys.executable, program, tmp_path / "reports", timeout=100, env=env)
    assert finished.returncode == 124, finished.stderr  # hydra may return 9 where it has to kill a rank, so none is
    name = call.removeprefix("hc.").partition("(")[0]
    assert f"rank 0 never reached {name} of 'world': it does not answer" in finished.stderr
    assert "rank 1 waits at" in finished.stderr
    assert "program.py:9" in finished.stderr


def test_many_quick_calls_are_not_one_that_hangs(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def agreed(_: Any, flag: bool) -> bool:
        begun.release()
        return go_on.acquire(timeout=60) and flag

    def look() -> tuple[Any, ...]:
        (found,) = (each for each in stacks.calls_in_flight() if each.record.name == "agree")
        return found.key

    monkeypatch.setattr(failures, "agree", agreed)

    def call() -> None:
        sys.settrace(None)  # a tool that measures coverage marks frames as well
        for _ in range(3):
            process_group.agree(True)

    thread = threading.Thread(target=call)
    thread.start()
    keys = []
    for _ in range(3):
        assert begun.acquire(timeout=60)
        keys.append(look())
        assert look() == keys[-1]  # still the same call
        go_on.release()
    thread.join(60)
    assert len(set(keys)) == 3


def test_wait_any_ends_where_groups_raise(process_group: hc.ProcessGroup) -> None:
    with hc.new_group(timeout=0.2, on_timeout="raise") as group:
        work = hc.irecv(np.empty(1), src=hc.get_rank(), group=group)
        with pytest.raises(hc.DistTimeoutError, match="wait_any: none of 1 operations is done in time"):
            hc.wait_any([work])
        work.abort()


def test_a_look_keeps_no_array_alive(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(failures, "agree", lambda comm, flag: [seen.extend(stacks.calls_in_flight()), flag][1])

    class Flag:
        pass

    flag = Flag()
    gone = weakref.ref(flag)
    process_group.agree(flag)  # type: ignore[arg-type]
    del flag
    assert [each.record.name for each in seen] == ["agree"]
    assert gone() is None


@pytest.mark.parametrize(("between", "first"), [("nothing", 1.0), ("an operation", 2.0), ("a group is collected", 1.0)])
def test_asking_is_waiting_unless_the_program_goes_on(
    between: str, first: float, process_group: hc.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process has a watchdog of its own, which may look in between, and would set the note of the asking back.
    monkeypatch.setattr("hpccomm.debug.watchdog._was_asked", lambda each: each is work and each.was_asked)
    watchdog = Watchdog(Reporter(0, 1, tmp_path))
    gone = hc.new_group()
    gone.barrier()
    gone.destroy()
    work = hc.irecv(np.empty(1), src=hc.get_rank(), tag=5)
    for second in (1.0, 2.0):
        assert not work.is_completed()
        watchdog.look(second)
        if between == "an operation":
            hc.barrier()
        elif between == "a group is collected":
            gone = None
            gc.collect()
    hc.isend(np.ones(1), dst=hc.get_rank(), tag=5).wait()
    work.wait()
    (seen,) = watchdog._seen.values()
    assert seen.first == first

"""Hooks for every group: those that there are and those that come; a check for NaN, a log, ranges for profilers."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
import hpccomm.debug

pytestmark = pytest.mark.usefixtures("process_group")


class Names:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, operation: hc.Operation) -> None:
        self.seen.append(operation.name)

    def end(self, operation: hc.Operation) -> None:
        pass


def test_a_hook_is_on_all_groups_until_it_is_taken_away() -> None:
    names, early = Names(), hc.new_group()
    handle = hpccomm.debug.register_hook(names)
    late = hc.new_group()
    for group in (None, early, late):
        hc.barrier(group)
    assert names.seen == ["barrier"] * 3
    early.destroy()
    handle.remove()
    handle.remove()
    for group in (None, late, hc.new_group()):
        hc.barrier(group)
    assert names.seen == ["barrier"] * 3
    late.destroy()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_input_is_refused_before_it_is_sent(process_group: hc.ProcessGroup, bad: float) -> None:
    x = np.ones((2, 3), np.float32)
    x[1, 2] = bad
    with hpccomm.debug.check_numerics():
        hc.all_reduce(np.ones(3))
        number = process_group.sequence_number + 1
        what = rf"all_reduce #{number} of 'world' \(24 B float32\): array before it"
        with pytest.raises(hc.DistError, match=rf"{what}: {bad} at \[1, 2\], 1 of 6 elements"):
            hc.all_reduce(x)
    hc.all_reduce(x)  # it is over


def test_what_comes_out_bad_is_told_of() -> None:
    with (
        hpccomm.debug.check_numerics(),
        np.errstate(over="ignore"),
        pytest.raises(hc.DistError, match=r"array after it: inf at \[0\], 1 of 2 elements"),
    ):
        hc.all_reduce(np.array([1e308, 1.0]), hc.ReduceOp.PREMUL_SUM(100.0))


def test_what_has_not_come_yet_is_not_looked_at(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    bad = np.full(2, np.nan)
    with hpccomm.debug.check_numerics():
        hc.broadcast(np.ones(2) if me == 0 else bad.copy(), src=0)
        hc.all_gather_single(np.full(2 * n, np.nan), np.ones(2))
        hc.sendrecv(np.ones(2), (me + 1) % n, bad.copy(), (me - 1) % n)
        with hc.coalescing():
            hc.all_gather_single(np.full(2 * n, np.nan), np.ones(2))
        hc.all_reduce(np.ones(2, int))
        hc.all_gather_object([None] * n, np.nan)
        receive = hc.irecv(bad.copy(), me, tag=3)
        hc.isend(np.ones(2), me, tag=3).wait()
        receive.wait()


@pytest.mark.parametrize("is_persistent", [False, True])
def test_ghosts_of_halos_are_not_looked_at(process_group: hc.ProcessGroup, is_persistent: bool) -> None:
    block = np.full(5, np.nan)
    block[1:-1] = 1
    with hc.new_grid((process_group.size,), periodic=False) as grid, hpccomm.debug.check_numerics():
        if is_persistent:
            with hc.halo_exchange_init(block, grid) as halo:
                halo.run()
        else:
            hc.halo_exchange(block, grid)
        block[2] = np.inf
        with pytest.raises(hc.DistError, match=r"arrays\[0\] without its ghosts before it: inf at \[1\], 1 of 3"):
            hc.halo_exchange(block, grid)


def test_a_warning_lets_it_go_on(process_group: hc.ProcessGroup) -> None:
    x = np.array([np.nan])
    with hpccomm.debug.check_numerics("warn"), pytest.warns(hc.HpccommWarning, match="nan at") as seen:
        hc.all_reduce(x)
    assert len(seen) == 2  # before and after
    with pytest.raises(ValueError, match="action is 'exit'"):
        hpccomm.debug.check_numerics("exit")


def test_the_log_has_a_line_for_each_operation(
    process_group: hc.ProcessGroup, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with hpccomm.debug.log_operations(), caplog.at_level(logging.INFO, "hpccomm.operations"):
        hc.broadcast(np.zeros(256), src=0)
        hc.all_reduce(np.zeros(1), "max", async_op=True).wait()
    number, me = process_group.sequence_number, process_group.rank
    first, second = caplog.messages
    assert first.startswith(f"rank {me}: broadcast #{number - 1} of 'world' (2 KiB float64), peer 0, ")
    assert first.endswith(" us, ok")
    assert second.startswith(f"rank {me}: all_reduce #{number} of 'world' (8 B float64), MAX, async, ")
    with hpccomm.debug.log_operations(str(tmp_path / "rank{rank}.log")):
        hc.barrier()
        hc.barrier()
    assert (tmp_path / f"rank{me}.log").read_text().count("barrier") == 2


@pytest.mark.once
def test_the_log_stays_where_it_is_if_the_program_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    group = hc.new_group(group_desc="own", use_local_synchronization=True, ranks=[hc.get_rank()])
    with hpccomm.debug.log_operations("log"):
        monkeypatch.chdir("elsewhere")
        hc.barrier(group)
    group.destroy()
    assert (tmp_path / "log").read_text().count("barrier") == 1


def test_the_log_names_the_global_rank_in_every_group(process_group: hc.ProcessGroup, tmp_path: Path) -> None:
    me, size = process_group.rank, process_group.size
    with (
        hc.new_group(range(size)[::-1], sort_ranks=False) as group,
        hpccomm.debug.log_operations(str(tmp_path / "{rank}.log")),
    ):
        assert group.rank == size - 1 - me
        hc.barrier(group)
    assert [file.name for file in tmp_path.iterdir()] == [f"{me}.log"]
    assert (tmp_path / f"{me}.log").read_text().startswith(f"rank {me}: barrier")


@pytest.mark.parametrize("provider", ["nvtx", "cupy.cuda.nvtx"])
def test_ranges_begin_and_end(monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    opened: list[str] = []
    module: Any = types.ModuleType(provider)
    module.available = True
    module.start_range = lambda message: opened.append(message) or len(opened)
    module.RangeStart = lambda message, colour: opened.append(message) or len(opened)
    closed: list[int] = []
    module.end_range = module.RangeEnd = closed.append
    for name in ("nvtx", "cupy.cuda.nvtx"):
        monkeypatch.setitem(sys.modules, name, module if name == provider else None)  # type: ignore[arg-type]
    with hpccomm.debug.nvtx_ranges():
        hc.barrier()
        hc.all_reduce(np.zeros(2), async_op=True).wait()
    assert [each.split(" #")[0] for each in opened] == ["barrier", "all_reduce"]
    assert closed == [1, 2]
    monkeypatch.setitem(sys.modules, provider, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="pip install nvtx"):
        hpccomm.debug.nvtx_ranges()


def test_durations_are_those_of_operations_after_timing_was_enabled() -> None:
    group = hc.new_group()
    work = hc.all_reduce(np.zeros(2), group=group, async_op=True)
    work.wait()
    with pytest.raises(hc.DistError, match=r"all_reduce: nobody has looked at the clock; call enable_timing"):
        work.get_duration()
    group.enable_timing()
    group.enable_timing()
    receive = hc.irecv(np.zeros(2), group=group, group_src=group.rank)
    with pytest.raises(hc.DistError, match="recv #1: it is still in flight"):
        receive.get_duration()
    hc.isend(np.zeros(2), group=group, group_dst=group.rank).wait()
    receive.wait()
    duration = receive.get_duration()
    assert 0 < duration < 60
    assert receive.get_duration() == duration
    assert len(group.dispatcher.hooks) == 1
    group.destroy()


def test_durations_are_known_while_operations_are_recorded() -> None:
    with hpccomm.debug.record():
        work = hc.all_reduce(np.zeros(2), async_op=True)
        work.wait()
    (record,) = hpccomm.debug.recorded()
    assert work.get_duration() == pytest.approx(record.end - record.begin, abs=1e-6)

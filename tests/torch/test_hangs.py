"""The verdict on a program of PyTorch that hangs names lines of the program, not of torch."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from ..launch import launch, time_limit

pytestmark = pytest.mark.serial

PROGRAM = """
    import sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    import hpccomm.torch
    hpccomm.torch.init_process_group(timeout=timedelta(seconds={seconds}))
    x, model = torch.ones(2, 4), torch.nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    {before}
    def train():
        if dist.get_rank() == 1:
            time.sleep(1000)
        {call}
    train()
    """
CASES = {
    "a collective": ("pass", "dist.all_reduce(x)"),
    "a functional one": ("pass", "functional.all_reduce(x, 'sum', dist.group.WORLD).sum()"),
    "DTensor": ("d = distribute_tensor(x.repeat(3, 1), mesh, [Shard(0)])", "d.full_tensor()"),
    "FSDP2": ("fully_shard(model, mesh=mesh)", "model(x)"),
    "DDP": ("model = torch.nn.parallel.DistributedDataParallel(model)", "model(x).sum().backward()"),
}
MORE = {
    "one that is waited for": ("pass", "dist.all_reduce(x, async_op=True).wait()"),
    "of Python's objects": ("pass", "dist.all_gather_object([None] * dist.get_world_size(), 1)"),
    "a message": ("pass", "dist.recv(x, 1)"),
    "a barrier": ("pass", "dist.barrier()"),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_the_verdict_names_the_lines_of_the_program(case: str, tmp_path: Path) -> None:
    before, call = (CASES | MORE)[case]
    program = tmp_path / "program.py"
    source = PROGRAM.format(before=before, call=call, seconds=time_limit(3))
    program.write_text(textwrap.dedent(source), encoding="utf-8")
    reports = {"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")}
    ended = launch(2, sys.executable, program, timeout=time_limit(90), env=reports)
    sleeps, waits = (
        next(number for number, line in enumerate(program.read_text().splitlines(), 1) if line.strip() == text)
        for text in ("time.sleep(1000)", call)
    )
    said = rf"rank 1 (never reached|has not answered) .*program\.py:{sleeps} in train, in time\.sleep\(1000\)"
    assert re.search(said, ended.stderr), ended.stderr
    assert re.search(rf"rank 0 waits at \S*program\.py:{waits}\b", ended.stderr), ended.stderr
    assert ended.returncode in (124, 9), ended.stderr

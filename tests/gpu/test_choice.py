"""The GPU that a rank takes: a table of the GPUs that ranks see under the launchers' options."""

from __future__ import annotations

from typing import Any

import pytest

from hpccomm.cuda.choice import VisibleGPUs, choose, mig_instances, take_turns, visible_gpus

pytestmark = pytest.mark.serial

ALL = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        pytest.param([ALL] * 4, [0, 1, 2, 3], id="all ranks see all GPUs"),
        pytest.param([ALL] * 6, [0, 1, 2, 3, 0, 1], id="more ranks than GPUs"),
        pytest.param([ALL[::-1]] * 4, [0, 1, 2, 3], id="CUDA_VISIBLE_DEVICES=3,2,1,0"),
        pytest.param([["a"], ["b"], ["c"], ["d"]], [0, 0, 0, 0], id="--gpus-per-task=1"),
        pytest.param([["a"], ["a"], ["b"], ["b"]], [0, 0, 0, 0], id="--gpu-bind=single:2"),
        pytest.param([["a", "b"], ["c", "d"]] * 2, [0, 0, 1, 1], id="--gpu-bind=closest, cyclic"),
        pytest.param([["a", "b"]] * 2 + [["c", "d"]] * 2, [0, 1, 0, 1], id="--gpu-bind=closest, block"),
        pytest.param([["a", "b"]] * 3 + [["c", "d"]] * 3, [0, 1, 0, 0, 1, 0], id="three ranks on each half"),
        pytest.param([["a", "b"], ["c", "d"]], [0, 0], id="--gpus-per-task=2"),
        pytest.param([["a", "b"], ["a"]], [1, 0], id="who has no choice comes first"),
        pytest.param([["m"], ["m"]], [0, 0], id="two MIG instances, of which CUDA shows the first"),
        pytest.param([["n1 a", "n1 b"]] * 2 + [["n2 a", "n2 b"]] * 2, [0, 1, 0, 1], id="two nodes"),
        pytest.param([["n1 a", "n1 b"], ["n2 a", "n2 b"]] * 2, [0, 0, 1, 1], id="two nodes, ranks dealt in turn"),
        pytest.param([ALL[:2]] * 4, [0, 1, 0, 1], id="two containers of one machine"),
        pytest.param([], [], id="nobody"),
    ],
)
def test_the_table(visible: list[list[str]], indices: list[int]) -> None:
    assert take_turns(visible) == indices


def test_a_rank_whose_gpu_is_decided_keeps_it_and_counts() -> None:
    both = VisibleGPUs(("a", "b"))
    visible = [both, VisibleGPUs(("a",), first=0), VisibleGPUs(("b",), first=1), both]
    assert choose(visible, range(4)) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("variable", "count"),
    [(None, 0), ("", 0), ("0,1", 0), ("GPU-8932f937", 0), ("MIG-1f2e,MIG-9a", 2), ("MIG-GPU-8932f937/1/0", 1)],
)
def test_mig_instances_are_counted(variable: str | None, count: int) -> None:
    assert mig_instances({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}) == count


def test_no_gpu_is_explained_with_the_variable(machine: Any) -> None:
    from . import stand_in

    machine.devices = 0
    assert visible_gpus(stand_in.Runtime(), None, {"CUDA_VISIBLE_DEVICES": "-1"}).error == (
        "CUDA shows no GPU (CUDA_VISIBLE_DEVICES is '-1')"
    )
    assert visible_gpus(stand_in.Runtime(), None, {}).error == "CUDA shows no GPU"

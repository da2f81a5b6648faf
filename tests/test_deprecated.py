"""Deprecated names work, and each use warns with the new name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

pytestmark = pytest.mark.serial


def of_the_group(name: str) -> Any:
    with getattr(hc.ProcessGroup, name)(MPI.COMM_SELF, name="mine") as group:
        return group.name, group.size


def of_an_exchange(name: str) -> Any:
    with hc.init_process_group() as world:
        sent = {0: np.arange(3)}
        return [getattr(owner, name)(sent)[0].tolist() for owner in (hc, world)]


def of_a_save(name: str, folder: Path) -> Any:
    with hc.init_process_group():
        for step in (1, 2, 3):
            options = {"local": folder / "local", "partner": False, name: 2}
            hc.checkpoint.save(folder / "shared", {"x": np.ones(2)}, step, **options)  # type: ignore[arg-type]
        hc.checkpoint.save_async(folder / "shared", {"x": np.ones(2)}, 4, **options).wait()  # type: ignore[arg-type]
        return hc.checkpoint.steps(folder / "shared")


@pytest.mark.parametrize(
    ("old", "new", "does"),
    [
        ("block", "block_slice", lambda name, _: getattr(hc, name)(10, 3, 1)),
        ("on", "from_comm", lambda name, _: of_the_group(name)),
        ("all_to_all_sparse", "exchange_sparse", lambda name, _: of_an_exchange(name)),
        ("drain_every", "flush_every", of_a_save),
    ],
)
def test_a_deprecated_name_does_the_same_and_warns(
    old: str, new: str, does: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    expected = does(new, tmp_path / "new")
    with pytest.warns(hc.HpccommDeprecationWarning, match=rf"\b{old} is deprecated.*; use {new}$") as caught:
        assert does(old, tmp_path / "old") == expected
    assert {each.filename for each in caught} == {__file__}
    assert issubclass(hc.HpccommDeprecationWarning, FutureWarning)  # which Python shows by default


def test_only_new_names_are_public() -> None:
    assert not {"block", "all_to_all_sparse"} & {*dir(hc), *hc.__all__}
    assert not {"on", "all_to_all_sparse"} & {*dir(hc.ProcessGroup(0, 1))}


def test_a_deprecated_operation_of_a_rank_outside_the_group() -> None:
    with pytest.warns(hc.HpccommDeprecationWarning), pytest.warns(hc.NonMemberWarning, match="^exchange_sparse: "):
        assert hc.NonMember().all_to_all_sparse({}) is None


def test_an_argument_by_both_names_is_refused(tmp_path: Path) -> None:
    with pytest.warns(hc.HpccommDeprecationWarning), pytest.raises(TypeError, match=r"multiple values.*flush_every"):
        hc.checkpoint.save(tmp_path, {}, 1, flush_every=1, drain_every=1)  # type: ignore[call-arg]

"""Tests for a rehearsal of tools/gpu-first, which names this file: two of them end their process."""

from __future__ import annotations

import hpccomm as hc

from . import gpus
from .stand_in import CUDAError, Runtime


def test_that_ends_the_context_of_one_rank(process_group: hc.ProcessGroup) -> None:
    def fail(self: Runtime, stream: int) -> None:
        raise CUDAError("cudaErrorMisalignedAddress: misaligned address")

    if process_group.rank == process_group.size - 1:
        Runtime.synchronize_stream = fail  # type: ignore[method-assign]
        Runtime().synchronize_stream(gpus.current_stream())


def test_that_needs_the_context() -> None:
    Runtime().synchronize_stream(gpus.current_stream())


def test_that_fails_on_one_rank_while_the_others_wait(process_group: hc.ProcessGroup) -> None:
    assert process_group.rank != 0
    hc.barrier()


def test_that_comes_last() -> None:
    Runtime().synchronize_stream(gpus.current_stream())

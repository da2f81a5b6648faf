"""Records: operations as reports and recordings tell them."""

from __future__ import annotations

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.debug import stacks

pytestmark = pytest.mark.serial


class Tensor:
    """A torch.Tensor's way of telling its size."""

    dtype = np.dtype(np.float16)

    def size(self) -> tuple[int, ...]:
        return (3, 4)

    def numel(self) -> int:
        return 12


def test_a_tensor_whose_size_is_a_method(process_group: hc.ProcessGroup) -> None:
    work = hc.all_reduce(np.ones(1), group=process_group, async_op=True)
    work.wait()
    work.flight = work.flight._replace(result=Tensor())
    record = stacks.record_of(work)
    assert (record.dtype, record.count, record.nbytes) == ("float16", 12, 24)

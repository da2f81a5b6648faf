"""all_reduce of cupyx's sparse matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.backend import Backend, finished
from ..core.options import Membership
from ..core.sparse import counts_of_all
from ..core.work import Work
from . import seam


def all_reduce(group: Membership, backends: Mapping[str, Backend], matrix: Any, async_op: bool) -> Work | None:
    """Gather the rows, columns and values of all ranks as three arrays, and sum the entries on each GPU."""
    runtime = seam.runtime()
    coordinates = matrix.tocoo()
    mine = [coordinates.row, coordinates.col, coordinates.data]
    device = matrix.data.data.device_id
    stream = runtime.current_stream(device)
    counts = counts_of_all(group, backends, matrix, coordinates.data.size)
    gathered = [runtime.empty((int(counts.sum()),), each.dtype, device, stream) for each in mine]
    ends = np.cumsum(counts)
    outputs = [[each[end - count : end] for each in gathered] for count, end in zip(counts.tolist(), ends.tolist())]

    def assign() -> None:
        rows, columns, values = gathered
        runtime.sum_entries(matrix, rows, columns, values, device, runtime.current_stream(device))

    return finished(backends["cuda"].all_gather_coalesced(outputs, mine, async_op), assign)

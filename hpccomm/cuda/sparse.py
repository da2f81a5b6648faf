"""all_reduce of the sparse matrices of cupyx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.backend import Backend
from ..core.options import Membership
from ..core.sparse import counts_of_all, finished
from ..core.work import Work
from . import seam


def all_reduce(group: Membership, backends: Mapping[str, Backend], matrix: Any, async_op: bool) -> Work | None:
    """Gather everybody's rows, columns and values as three arrays, and add up the entries on each GPU.

    The dtype of the entries has no room for rows and columns beside the values there.
    """
    runtime = seam.runtime()
    coordinates = matrix.tocoo()
    mine = [coordinates.row, coordinates.col, coordinates.data]
    device = matrix.data.data.device_id
    stream = runtime.current_stream(device)
    counts = counts_of_all(group, backends, coordinates.data.size)
    everybody = [runtime.empty((int(counts.sum()),), each.dtype, device, stream) for each in mine]
    ends = np.cumsum(counts)
    outputs = [
        [each[end - count : end] for each in everybody]
        for count, end in zip(counts.tolist(), ends.tolist(), strict=True)
    ]

    def assign() -> None:
        rows, columns, values = everybody
        runtime.sum_entries(matrix, rows, columns, values, device, runtime.current_stream(device))

    return finished(backends["cuda"].all_gather_coalesced(outputs, mine, async_op), assign)

"""Copies of arrays on the host, in memory that is reused from save to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.arrays import module_of
from ..core.late import ON_THE_HOST, late

ALIGNMENT = 64  # bytes


class Copies:
    """Memory for copies. It is reused because the page faults of new memory take longer than the copy."""

    def __init__(self) -> None:
        self._memory: dict[bool, Any] = {}  # True: page-locked, for the copies of GPU arrays

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """Return finished copies in C order; GPU arrays are copied on the current stream."""
        copies: list[Any] = [None] * len(arrays)
        for on_gpu in (False, True):
            places = [i for i, array in enumerate(arrays) if (module_of(array) is not np) == on_gpu]
            for i, target in zip(places, self._targets([arrays[i] for i in places], on_gpu)):
                if on_gpu:
                    late(ON_THE_HOST)(arrays[i], target)
                else:
                    np.copyto(target, arrays[i])
                copies[i] = target
        return copies

    def keep(self, most: int | None) -> None:
        """Free the memory if it has more than `most` bytes (None: no limit). The copies are no longer used."""
        if most is not None and sum(memory.nbytes for memory in self._memory.values()) > most:
            self._memory.clear()

    def _targets(self, arrays: Sequence[Any], on_gpu: bool) -> list[Any]:
        """Return uninitialised arrays with the shapes and dtypes of `arrays`, in the reused memory."""
        ends = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        if on_gpu not in self._memory or self._memory[on_gpu].nbytes < ends[-1]:
            self._memory.pop(on_gpu, None)  # first: both may not fit
            self._memory[on_gpu] = _allocated(ends[-1], on_gpu)
        return [np.ndarray(each.shape, each.dtype, self._memory[on_gpu], at) for each, at in zip(arrays, ends)]


def _allocated(nbytes: int, is_page_locked: bool) -> Any:
    if not is_page_locked or nbytes == 0:
        return np.empty(nbytes, np.uint8)
    from ..cuda import seam

    return seam.runtime().pinned(nbytes)

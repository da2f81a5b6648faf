"""GradientBuckets: reduce many small arrays as a few large ones, while the program computes the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..core import checks
from ..core.arrays import Array, module_of
from ..core.non_member import Group
from ..core.reduce_op import ReduceOp, ReduceOpLike, as_reduce_op
from ..core.work import Work
from ..errors import DistError, on_rank
from .collectives import all_reduce
from .ranks import get_world_size
from .world import member

BUCKET_BYTES = 4 << 20


class GradientBuckets:
    """Arrays packed in flat buckets; each bucket is reduced when all of its arrays are ready.

    The arrays are packed from the last to the first, the order in which back-propagation produces gradients. Every rank
    reduces the buckets in that order, even if arrays become ready in another one. So the calls of all ranks match.

    Parameters
    ----------
    arrays : list of numpy.ndarray or of cupy.ndarray
        The arrays to pack; their values are copied. Each dtype has its own buckets, and an array larger than
        `bucket_bytes` has a bucket to itself.
    bucket_bytes : int
        The maximum size of a bucket of several arrays. Default: 4 MiB.
    op : ReduceOp, str or mpi4py.MPI.Op
        Default: AVG.
    group : ProcessGroup, optional
        Default: the world.
    compression : dtype, optional
        Reduce in this dtype (``np.float16``, ``ml_dtypes.bfloat16``) and convert back. It halves the bytes sent if the
        backend reduces half precision directly. MPI's backend reduces it in float32: it sends as much, and rounds.
    reproducible : bool
        Reduce by ``ReduceOp.REPRODUCIBLE_SUM``; if `op` is AVG, divide by the number of ranks afterwards. No bit
        depends on the order of the ranks, the MPI library or the buckets. Gradients of similar magnitude take two to
        four times the bytes, and `ready` waits for the other ranks at the last array of a bucket.

    Attributes
    ----------
    arrays : list of numpy.ndarray or of cupy.ndarray
        Views of the buckets, with the shapes and dtypes of the original arrays. Write gradients and read results here.
    buckets : list of numpy.ndarray or of cupy.ndarray
        The flat buckets.

    Raises
    ------
    ValueError
        The list is empty, arrays are on different devices, `bucket_bytes` is not positive, or `op` is neither SUM nor
        AVG with ``reproducible=True``.
    TypeError
        An item is not an array, has object dtype or foreign byte order, or holds integers for a reproducible AVG.

    Examples
    --------
    >>> buckets = hc.GradientBuckets([np.zeros((2, 2)), np.zeros(2)])
    >>> for i in (1, 0):
    ...     buckets.arrays[i][...] = hc.get_rank()  # back-propagation
    ...     buckets.ready(i)
    >>> buckets.wait()
    >>> buckets.arrays[1]  # on 4 ranks: array([1.5, 1.5])
    array([0., 0.])
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        bucket_bytes: int = BUCKET_BYTES,
        op: ReduceOpLike = ReduceOp.AVG,
        group: Group | None = None,
        compression: Any = None,
        reproducible: bool = False,
    ) -> None:
        _, given = checks.array_list("GradientBuckets", "arrays", arrays, checks.readable)
        bucket_bytes = checks.integer("GradientBuckets: bucket_bytes", bucket_bytes)
        if bucket_bytes < 1:
            raise ValueError(f"GradientBuckets: bucket_bytes is {bucket_bytes}; expected 1 or more{on_rank()}")
        member(group)
        self._op = op
        self._group = group
        self._divisor = None
        if reproducible:
            self._op, self._divisor = ReduceOp.REPRODUCIBLE_SUM, _divisor(op, given, group)
        elif compression is None:
            checks.reductions("GradientBuckets", "arrays", given, op)
        self._compression = None if compression is None else np.dtype(compression)
        module = module_of(given[0])
        self._members = _partition([(array.dtype, array.nbytes) for array in given], bucket_bytes)
        self._bucket_of = {i: number for number, members in enumerate(self._members) for i in members}
        self.buckets: list[Array] = []
        views: dict[int, Array] = {}
        for members in self._members:
            flat = module.concatenate([given[i].reshape(-1) for i in members])
            ends = accumulate(given[i].size for i in members)
            for i, end in zip(members, ends, strict=True):
                views[i] = flat[end - given[i].size : end].reshape(given[i].shape)
            self.buckets.append(flat)
        self.arrays = [views[i] for i in range(len(arrays))]
        self._begin()

    def _begin(self) -> None:
        self._missing = [set(members) for members in self._members]
        self._works: list[tuple[Work | None, Array]] = []

    def ready(self, index: int, array: Array | None = None) -> None:
        """Mark ``arrays[index]`` as complete; its bucket is reduced when all of its arrays are complete.

        Parameters
        ----------
        index : int
            The array's index in `arrays`.
        array : numpy.ndarray, cupy.ndarray, torch.Tensor, optional
            The array that the program wrote, to check that it is ``arrays[index]``. After PyTorch's
            ``zero_grad(set_to_none=True)`` a gradient is a new tensor outside the buckets, and would not be reduced.

        Raises
        ------
        IndexError
            There is no such array.
        DistError
            The array was ready already in this step, or `array` is not in the buckets.
        """
        if index not in self._bucket_of:
            raise IndexError(
                f"GradientBuckets.ready: there is no array {index}; expected 0 to {len(self.arrays) - 1}{on_rank()}"
            )
        missing = self._missing[self._bucket_of[index]]
        if index not in missing:
            raise DistError(
                f"GradientBuckets.ready: array {index} was ready already; wait() begins the next step{on_rank()}"
            )
        if array is not None:
            view = self.arrays[index]
            _, given = checks.readable("GradientBuckets.ready", "array", array)
            if view.size and not module_of(view).may_share_memory(view, given):
                raise DistError(
                    f"GradientBuckets.ready: array is not arrays[{index}] but a copy, which would not be reduced; with "
                    f"PyTorch write optimizer.zero_grad(set_to_none=False), so that gradients stay in the buckets"
                    f"{on_rank()}"
                )
        missing.remove(index)
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            flat = self.buckets[len(self._works)]
            with np.errstate(all="ignore"):  # overflow gives inf, as in a sum of this dtype
                sent = flat if self._compression is None else flat.astype(self._compression)
            self._works.append((all_reduce(sent, self._op, self._group, async_op=True), sent))

    def wait(self) -> None:
        """Block until every array holds its reduced values, and begin the next step.

        Raises
        ------
        DistError
            An array is not ready yet.
        """
        if len(self._works) < len(self.buckets):
            missing = sorted(i for members in self._missing for i in members)
            raise DistError(f"GradientBuckets.wait: arrays {missing} are not ready{on_rank()}")
        for (work, sent), flat in zip(self._works, self.buckets, strict=True):
            if work is not None:  # None: this rank is not in the group
                work.wait()
            with np.errstate(all="ignore"):
                if sent is not flat:
                    flat[...] = sent
                if work is not None and self._divisor is not None:
                    flat /= self._divisor
        self._begin()


def _divisor(op: ReduceOpLike, arrays: list[Any], group: Group | None) -> int | None:
    """Return the divisor of a reproducible sum of `arrays`; None if there is no division."""
    op = as_reduce_op("GradientBuckets", op)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"GradientBuckets: reproducible=True is for the ops sum and avg, not {op!r}{on_rank()}")
    checks.reductions("GradientBuckets", "arrays", arrays, op)
    return get_world_size(group) if op is ReduceOp.AVG else None


def _partition(arrays: list[tuple[np.dtype[Any], int]], bucket_bytes: int) -> list[list[int]]:
    """Return the indices of each bucket's arrays, from the last array to the first."""
    buckets: list[list[int]] = []
    room: dict[Any, int] = {}  # bytes left in the open bucket of each dtype
    open_bucket: dict[Any, int] = {}
    for i in range(len(arrays) - 1, -1, -1):
        dtype, nbytes = arrays[i]
        if dtype not in open_bucket or nbytes > room[dtype]:
            open_bucket[dtype] = len(buckets)
            room[dtype] = bucket_bytes
            buckets.append([])
        buckets[open_bucket[dtype]].append(i)
        room[dtype] -= nbytes
    return buckets

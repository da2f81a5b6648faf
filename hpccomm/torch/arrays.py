"""Tensors as NumPy's arrays on the same memory, by the compiled extension or DLPack; sparse ones as scipy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..native import fastpath

# Kinds of values as DLPack numbers them (DLDataTypeCode), and which sizes NumPy has of them, in bytes.
KINDS = {(0, "i"): (1, 2, 4, 8), (1, "u"): (1, 2, 4, 8), (2, "f"): (2, 4, 8), (5, "c"): (8, 16), (6, "b"): (1,)}


def as_array(tensor: Any) -> Any:
    """Return NumPy's view of a tensor; the tensor itself where there is none, for hpccomm to view."""
    view = view_of(tensor)
    return tensor if view is None else view


def as_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Return the view of each tensor."""
    return [as_array(tensor) for tensor in tensors]


def as_flat_array(tensor: Any) -> Any:
    """Return the view of a tensor in one dimension, as c10d compares only numbers of elements."""
    view = view_of(tensor, True)
    if view is not None:
        return view
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def view_by_dlpack(tensor: Any, flat: bool = False) -> Any:
    """Return NumPy's view of a tensor, in one dimension where there are no gaps and it is to be `flat`; or None."""
    try:
        # After tensor.numpy() the storage can't be resized any more, as FSDP1 does; DLPack forgets is_neg.
        if not tensor.is_neg() and (view := np.from_dlpack(tensor)).flags.writeable:  # NumPy 1's is read-only
            return view.reshape(-1) if flat and view.flags.c_contiguous else view
    except (RuntimeError, TypeError, BufferError):  # it has a gradient, is bfloat16, or is on a GPU
        pass
    return None


def view_by_room() -> Any:
    """Return the compiled extension's `view_by_dlpack`, in a tenth of the time; None where there is none."""
    if fastpath is None:
        return None
    numbers = {
        (code, 8 * size): np.dtype(f"{kind}{size}").num for (code, kind), sizes in KINDS.items() for size in sizes
    }
    fastpath.set_up_tensors((torch.Tensor, torch.nn.Parameter), numbers)
    return fastpath.view


view_of = view_by_room() or view_by_dlpack


def as_scipy(tensor: Any) -> Any:
    """Return a sparse tensor as a matrix: sparse dimensions as rows, dense ones as columns."""
    from scipy import sparse

    entries = tensor.coalesce()
    places, values = entries.indices().cpu().numpy(), entries.values().cpu().numpy()
    columns = int(np.prod(values.shape[1:]))
    shape = tensor.shape[: tensor.sparse_dim()]
    rows = np.repeat(np.ravel_multi_index(places, shape), columns)
    where = rows, np.tile(np.arange(columns), len(values))
    return sparse.coo_array((values.reshape(-1), where), shape=(int(np.prod(shape)), columns))


def as_torch(matrix: Any, like: Any) -> Any:
    """Return a matrix as a sparse tensor with the shape of `like`."""
    compressed = matrix.tocsr()
    (rows,) = np.nonzero(np.diff(compressed.indptr))
    dimensions = like.sparse_dim()
    places = np.array(np.unravel_index(rows, like.shape[:dimensions]), np.int64)
    values = compressed[rows].toarray().reshape(-1, *like.shape[dimensions:])
    entries = torch.from_numpy(places), torch.from_numpy(values)
    return torch.sparse_coo_tensor(*entries, like.shape, device=like.device)

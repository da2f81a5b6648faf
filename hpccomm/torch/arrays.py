"""Tensors as NumPy arrays on the same memory, by the compiled extension or DLPack; sparse tensors as scipy matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.arrays import look_at_tensors
from ..native import fastpath


def as_array(tensor: Any) -> Any:
    """Return NumPy's view of a tensor; if there is none, the tensor itself, which hpccomm can view."""
    view = view_of(tensor)
    return tensor if view is None else view


def as_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Return the view of each tensor."""
    return [as_array(tensor) for tensor in tensors]


def as_flat_array(tensor: Any) -> Any:
    """Return a 1-D view of a tensor, because c10d compares only numbers of elements."""
    view = view_of(tensor, True)
    if view is not None:
        return view
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def view_by_dlpack(tensor: Any, flat: bool = False) -> Any:
    """Return NumPy's view of a tensor, 1-D if `flat` and contiguous; None if there is no such view."""
    try:
        # Not tensor.numpy(): the storage can't be resized afterwards, but FSDP1 resizes it. DLPack ignores is_neg.
        if not tensor.is_neg() and (view := np.from_dlpack(tensor)).flags.writeable:  # NumPy 1's is read-only
            return view.reshape(-1) if flat and view.flags.c_contiguous else view
    except (RuntimeError, TypeError, BufferError):  # it requires a gradient, is bfloat16, or is on a GPU
        pass
    return None


view_of = fastpath.view if fastpath and look_at_tensors(torch) else view_by_dlpack  # the former is 10 times faster


def as_scipy(tensor: Any) -> Any:
    """Return a sparse tensor as a matrix: rows for the sparse dimensions, columns for the dense ones."""
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

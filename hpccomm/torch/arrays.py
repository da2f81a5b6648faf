"""Tensors as NumPy arrays on the same memory, by the compiled extension or DLPack; sparse tensors as scipy matrices."""

from __future__ import annotations

import math
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
    """Return a sparse tensor as a matrix: columns for the dense dimensions, or for the last of several sparse ones.

    The dtypes that scipy lacks become float32.
    """
    from scipy import sparse

    entries = tensor.detach().coalesce()
    values = entries.values().cpu()
    values = (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
    places, shape = entries.indices().cpu().numpy(), tensor.shape[: tensor.sparse_dim()]
    if _has_columns(tensor):
        rows = np.ravel_multi_index(places[:-1], shape[:-1])
        return sparse.coo_array((values, (rows, places[-1])), shape=(math.prod(shape[:-1]), shape[-1]))
    columns = math.prod(values.shape[1:])
    rows = np.repeat(np.ravel_multi_index(places, shape), columns)
    where = rows, np.tile(np.arange(columns), len(values))
    return sparse.coo_array((values.reshape(-1), where), shape=(math.prod(shape), columns))


def as_torch(matrix: Any, like: Any) -> Any:
    """Return a matrix as a sparse tensor with the shape of `like`."""
    shape = like.shape[: like.sparse_dim()]
    places: Sequence[Any]
    if _has_columns(like):
        entries = matrix.tocoo()
        places, values = [*np.unravel_index(entries.row, shape[:-1]), entries.col], entries.data
    else:
        compressed = matrix.tocsr()
        (rows,) = np.nonzero(np.diff(compressed.indptr))
        places = np.unravel_index(rows, shape)
        values = compressed[rows].toarray().reshape(len(rows), *like.shape[len(shape) :])
    indices = torch.from_numpy(np.array(places, np.int64))
    return torch.sparse_coo_tensor(indices, torch.from_numpy(values).to(like.dtype), like.shape, device=like.device)


def _has_columns(tensor: Any) -> bool:
    return bool(tensor.sparse_dim() > 1 and tensor.dense_dim() == 0)

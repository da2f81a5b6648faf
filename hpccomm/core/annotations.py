"""Types of arguments and results, only for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

Integer: TypeAlias = SupportsIndex  # a Python or NumPy integer
SplitSizes: TypeAlias = "Sequence[int] | np.ndarray | None"  # rows for each rank; None: equal parts
Slices: TypeAlias = "Sequence[slice] | slice"  # a box of cells: a slice for each axis
Width: TypeAlias = "Integer | Sequence[Integer | Sequence[Integer]]"  # of a halo: for each axis, before and after
NAMED: Any = None  # the default of an array argument that also has a c10d name

if TYPE_CHECKING:
    from typing import Protocol

    import numpy as np
    from typing_extensions import Buffer

    class _DLPack(Protocol):
        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    class _OnGPU(Protocol):
        @property
        def __cuda_array_interface__(self) -> Any: ...

    class _Sparse(Protocol):
        @property
        def nnz(self) -> Any: ...

    class _OfProgram(Protocol):  # an array of a device added by register_device
        @property
        def dtype(self) -> Any: ...
        @property
        def size(self) -> Any: ...
        @property
        def shape(self) -> Any: ...

    Array: TypeAlias = Buffer | _DLPack | _OnGPU | _Sparse | _OfProgram
    Arrays: TypeAlias = Sequence[Array]
else:
    Array = Arrays = Any

"""Types of arguments and results, for type checkers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeVar

Integer: TypeAlias = SupportsIndex  # Python's, and NumPy's
SplitSizes: TypeAlias = "Sequence[int] | np.ndarray | None"  # rows for each rank; None: equal parts
Slices: TypeAlias = "Sequence[slice] | slice"  # a box of cells: a slice for each axis
Width: TypeAlias = "Integer | Sequence[Integer | Sequence[Integer]]"  # of a halo; for each axis, before and after
NAMED: Any = None  # the default of an array that may be given by c10d's name for it instead

if TYPE_CHECKING:
    from typing import Concatenate, Literal, ParamSpec, Protocol, overload

    import numpy as np
    from typing_extensions import Buffer, Unpack

    from .work import Work

    class _DLPack(Protocol):
        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    class _OnGPU(Protocol):
        @property
        def __cuda_array_interface__(self) -> Any: ...

    class _Sparse(Protocol):
        @property
        def nnz(self) -> Any: ...

    class _OfProgram(Protocol):  # of a device that register_device has added
        @property
        def dtype(self) -> Any: ...
        @property
        def size(self) -> Any: ...
        @property
        def shape(self) -> Any: ...

    Array: TypeAlias = Buffer | _DLPack | _OnGPU | _Sparse | _OfProgram
    Arrays: TypeAlias = Sequence[Array]
    P = ParamSpec("P")
    Rest = ParamSpec("Rest")
    First = TypeVar("First")
    Blocking = TypeVar("Blocking", covariant=True)  # the result without async_op

    class Asynchronous(Protocol[P, Blocking]):
        """A function that returns a Work if `async_op` is true; of such calls only the first argument is checked."""

        @overload
        def __call__(
            self: _Given[First, Rest], _: First, /, *__: Any, async_op: Literal[True], **named: Any
        ) -> Work: ...
        @overload
        def __call__(self, *, async_op: Literal[True], **named: Any) -> Work: ...
        @overload
        def __call__(self, *_: Unpack[tuple[Unpack[tuple[Any, ...]], Literal[True]]]) -> Work: ...
        @overload
        def __call__(
            self: _Given[First, Rest], _: First, /, *__: Any, async_op: Literal[False], **named: Any
        ) -> Blocking: ...
        @overload
        def __call__(
            self: _Given[First, Rest], _: First, /, *__: Any, async_op: bool, **named: Any
        ) -> Blocking | Work: ...
        @overload
        def __call__(self, *_: P.args, **named: P.kwargs) -> Blocking: ...

    _Given: TypeAlias = "Asynchronous[Concatenate[First, Rest], Any]"

    class _Method(Protocol[P, Blocking]):
        def __get__(self, group: object, kind: Any) -> Asynchronous[P, Blocking]: ...

    def asynchronous_method(method: Callable[Concatenate[Any, P], Blocking | Work]) -> _Method[P, Blocking]: ...  # noqa: D103

else:
    Array = Arrays = Any

    def asynchronous_method(method: Any) -> Any:
        """Return the method as it is."""
        return method

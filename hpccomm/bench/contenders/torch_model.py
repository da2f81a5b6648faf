"""The operations of torch.distributed's model; their arguments are the same in hpccomm and in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...core.operation_list import OPERATIONS
from ..registry import Arrays, Case
from .contender import Call, Contender, Method


def operation(name: str) -> Method:
    """Return the method that calls the library's function `name` with the arguments in the operation list."""
    arguments = [ARGUMENTS[each] for each in OPERATIONS[name].arguments]

    def method(self: TorchModel, case: Case, arrays: Arrays, async_op: bool) -> Call:
        given = [argument(self, case, arrays) for argument in arguments]
        return partial(self._function(name), *given, self._group, async_op)

    return method


def _input(arrays: Arrays) -> Any:
    """Return the input, which is the output array if the operation works in place."""
    return arrays.receive if arrays.send is None else arrays.send


def _output_lists(arrays: Arrays) -> list[list[Any]]:
    """Return a list of outputs for each rank; `receive` is their concatenation."""
    received, count = arrays.receive, len(arrays.send)
    return [received[start : start + count] for start in range(0, len(received), count)]


ARGUMENTS: dict[str, Callable[[Any, Case, Arrays], Any]] = {
    "array": lambda self, case, arrays: self._array(_input(arrays)),
    "arrays": lambda self, case, arrays: self._rows(_input(arrays)),
    "inputs": lambda self, case, arrays: self._rows(arrays.send) or None,  # None on ranks without inputs
    "output": lambda self, case, arrays: self._array(arrays.receive),
    "outputs": lambda self, case, arrays: None if arrays.receive is None else self._rows(arrays.receive),
    "output_lists": lambda self, case, arrays: _output_lists(arrays),
    "output_counts": lambda self, case, arrays: None,  # equal parts
    "input_counts": lambda self, case, arrays: None,
    "root": lambda self, case, arrays: self._rank(case.root),
    "op": lambda self, case, arrays: self._op(case),
}


class TorchModel(Contender):
    """The functions of `library`, a module with torch.distributed's model."""

    library: Any

    def wait(self, handle: Any) -> Any:
        """Wait for a Work."""
        return handle.wait()

    def poll(self, handle: Any) -> bool:
        """Return True if a Work is done."""
        return bool(handle.is_completed())

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of send or isend."""
        return self._message(self.library.isend if async_op else self.library.send, array, peer)

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of recv or irecv."""
        return self._message(self.library.irecv if async_op else self.library.recv, array, peer)

    def _message(self, function: Callable[..., Any], array: Any, peer: int) -> Call:
        group = () if self._group is None else (self._group,)
        return partial(function, self._array(array), self._rank(peer), *group)

    # -- differences between the libraries ---------------------------------------------------------------

    @property
    def _group(self) -> Any:
        """The argument `group`: None for the world."""
        return None

    def _function(self, name: str) -> Any:
        return getattr(self.library, name)

    def _array(self, array: Any) -> Any:
        return array

    def _rows(self, array: Any) -> list[Any]:
        return [self._array(row) for row in array]

    def _rank(self, rank: int) -> int:
        """Return the world rank of a rank in the group."""
        return rank

    def _op(self, case: Case) -> Any:
        return getattr(self.library.ReduceOp, case.op.upper())


# The operations whose arguments are in ARGUMENTS.
MEASURED = [name for name, spec in OPERATIONS.items() if spec.is_asynchronous and {*spec.arguments} <= ARGUMENTS.keys()]
for _name in MEASURED:
    if not _name.endswith("_coalesced"):  # torch's functions of these names take other arguments
        setattr(TorchModel, _name, operation(_name))

"""Custom reductions prepared (contiguous, widened, premultiplied arrays) and completed as MPI's are in `reductions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.backend import finished
from ..core.operation_list import OPERATIONS
from ..core.overlap import all_unaliased
from ..core.reduce_op import ReduceOp
from ..core.work import both
from .layout import Finish
from .reductions import in_place, reduction_input, reduction_output


def prepared(operation: str, call: Callable[..., Any], rank: int, ranks: int) -> Callable[..., Any]:
    """Return a backend's method `operation`: it prepares the arrays for `call`, and completes the outputs after it."""
    names = OPERATIONS[operation].arguments

    def method(*arguments: Any) -> Any:
        named = dict(zip(names, arguments, strict=False))
        op: ReduceOp = named["op"]
        is_written = named.get("root", rank) == rank and not (operation == "exscan" and rank == 0)
        finish: Finish = None
        outputs = [value for name, value in named.items() if name == "output"]
        outputs += named.get("outputs", [])

        def buffer_of(name: str, array: Any) -> Any:
            nonlocal finish
            if name.startswith("output"):
                buffer, then = reduction_output(array, op, ranks)
            elif is_written and names[0] == name:
                buffer, _, then = in_place(array, op, ranks)
            else:
                return reduction_input(all_unaliased([array], outputs)[0], op)
            finish = both(finish, then)
            return buffer

        for name, value in named.items():
            if isinstance(value, list):
                named[name] = [buffer_of(name, array) for array in value]
            elif hasattr(value, "dtype"):
                named[name] = buffer_of(name, value)
        if op.mpi_op is None and (op is ReduceOp.AVG or op.factor is not None):
            named["op"] = ReduceOp.SUM
        work = call(*named.values(), arguments[-1])
        return work if finish is None else finished(work, finish)

    return method

"""Preparation (contiguous, widened, premultiplied arrays) and completion of custom reductions, as in `reductions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.backend import finished
from ..core.operation_list import OPERATIONS, Role
from ..core.overlap import all_unaliased
from ..core.reduce_op import ReduceOp
from ..core.work import both
from .layout import Finish
from .reductions import in_place, reduction_input, reduction_output


def prepared(operation: str, call: Callable[..., Any], rank: int, ranks: int) -> Callable[..., Any]:
    """Return a backend's method `operation` that prepares the arrays for `call`, and completes the outputs after it."""
    spec = OPERATIONS[operation]

    def method(*arguments: Any) -> Any:
        named = dict(zip(spec.arguments, arguments, strict=False))
        op: ReduceOp = named["op"]
        is_root = named.get("root", rank) == rank
        finish: Finish = None

        def arrays_of(role: Role) -> list[Any]:
            return [named[role.name]] if role.form == "one" else named[role.name]

        outputs = [array for role in spec.roles if role.kind == "out" for array in arrays_of(role)]

        def buffer_of(role: Role, array: Any) -> Any:
            nonlocal finish
            if role.kind == "out":
                buffer, then = reduction_output(array, op, ranks)
            elif role.is_written(is_root) and not (operation == "exscan" and rank == 0):
                buffer, _, then = in_place(array, op, ranks)
            else:
                return reduction_input(all_unaliased([array], outputs)[0], op)
            finish = both(finish, then)
            return buffer

        for role in spec.roles:
            if role.is_array:
                buffers = [buffer_of(role, array) for array in arrays_of(role)]
                named[role.name] = buffers[0] if role.form == "one" else buffers
        if op.mpi_op is None and (op is ReduceOp.AVG or op.factor is not None):
            named["op"] = ReduceOp.SUM
        work = call(*named.values(), arguments[-1])
        return work if finish is None else finished(work, finish)

    return method

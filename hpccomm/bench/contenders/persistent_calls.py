"""hpccomm's persistent operations (``all_reduce_init`` and so on): made once, started and waited for many times."""

from __future__ import annotations

from typing import Any

import hpccomm as hc

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Unsupported
from .hpccomm_calls import HPCComm


class Persistent(HPCComm):
    """The functions of hpccomm with names in _init."""

    name = "persistent"

    def call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of start and wait, whether async_op or not."""
        operation = self._operation(benchmark, case, arrays)

        def call() -> None:
            operation.start()
            operation.wait()

        return call

    def start(self, benchmark: Benchmark, case: Case, arrays: Arrays) -> Call:
        operation = self._operation(benchmark, case, arrays)

        def start() -> Any:
            operation.start()
            return operation

        return start

    def _operation(self, benchmark: Benchmark, case: Case, arrays: Arrays) -> hc.PersistentWork:
        """Return the persistent operation, made with the plain function's arguments but async_op."""
        init = getattr(hc, f"{benchmark.name}_init", None)
        if init is None:
            raise Unsupported(f"hpccomm has no {benchmark.name}_init")
        plain: Any = super()._call(benchmark, case, arrays, False)
        made: hc.PersistentWork = init(*plain.args[:-1])
        return made

"""BackendOverMPI: what is overridden is what every form of the operation runs, and everything else is MPI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core import registry
from hpccomm.core.operation_list import OPERATIONS

from ..arrays import LAYOUTS, NUMERIC, assert_same, reduced, reductions_of
from ..arrays import REDUCTIONS as OPS
from ..arrays import values as values_of
from ..matrix.cases import GOOD
from ..matrix.test_matrix import FORMS, Opposite, every_overlap, goes_to_itself, has_form, perform, share_memory

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
OVERRIDABLE = [name for name in OPERATIONS if hasattr(hc.Backend, name) and "object" not in name]
REDUCTIONS = [name for name in OVERRIDABLE if OPERATIONS[name].reduces]


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))


def noting(name: str) -> tuple[type[hc.BackendOverMPI], list[tuple[Any, ...]]]:
    """A backend whose only operation of its own is `name`, which notes its arguments and leaves the work to MPI."""
    seen: list[tuple[Any, ...]] = []

    def override(self: Any, *arguments: Any) -> Any:
        seen.append(arguments)
        return getattr(hc.BackendOverMPI, name)(self, *arguments)

    return type("Noting", (hc.BackendOverMPI,), {name: override}), seen


@pytest.fixture
def world() -> Iterator[None]:
    with hc.init_process_group():
        yield


def forms_of(name: str) -> list[tuple[str, str]]:
    """The calls that are `name`: in every form, and coalesced."""
    calls = [(name, form) for form in FORMS if has_form(name, form) and name in GOOD]
    collected = [form for form in calls if form[1] != "coalescing" or OPERATIONS[name].is_collected]
    return collected + (forms_of(f"{name}_coalesced") if f"{name}_coalesced" in OPERATIONS else [])


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_every_form_runs_the_override(world: None, name: str) -> None:
    kind, seen = noting(name)
    hc.register_backend("noting", kind, devices="cpu", extended_api=True)
    with hc.new_group(backend="cpu:noting") as group:
        for call, form in forms_of(name):
            if goes_to_itself(call, form, group):
                continue
            opposite = Opposite(call, group)
            hc.barrier(group)
            seen.clear()
            perform(call, form, group)
            assert seen, (call, form)
            opposite.finish()


def test_everything_else_is_mpis(world: None) -> None:
    class Refusing(hc.BackendOverMPI):
        def all_reduce(self, array: Any, op: Any, async_op: bool) -> hc.Work | None:
            raise AssertionError("nobody has called all_reduce")

    hc.register_backend("refusing", Refusing, devices="cpu", extended_api=True)
    with hc.new_group(backend="cpu:refusing") as group:
        for name in GOOD:
            for form in FORMS:
                collected = form != "coalescing" or OPERATIONS[name].is_collected
                if not has_form(name, form) or not collected or name in ("all_reduce", "all_reduce_coalesced"):
                    continue
                if not goes_to_itself(name, form, group):
                    opposite = Opposite(name, group)
                    perform(name, form, group)
                    opposite.finish()
        with pytest.raises(AssertionError, match="nobody"):
            hc.all_reduce(np.ones(1), group=group)


def test_gradient_buckets_run_the_override(world: None) -> None:
    kind, seen = noting("all_reduce")
    hc.register_backend("noting", kind, devices="cpu", extended_api=True)
    with hc.new_group(backend="cpu:noting") as group:
        buckets = hc.GradientBuckets([np.zeros(2), np.zeros(3)], group=group)
        for i in (1, 0):
            buckets.arrays[i][...] = RANK
            buckets.ready(i)
        buckets.wait()
        assert buckets.arrays[0][0] == (SIZE - 1) / 2
    ((array, op, async_op),) = seen
    assert (array.size, op, async_op) == (5, hc.ReduceOp.SUM, True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_overridden_reduction_gets_what_mpi_gets(world: None, name: str, layout: Any) -> None:
    kind, seen = noting(name)
    hc.register_backend("noting", kind, devices="cpu", extended_api=True)
    outputs = [i for i, argument in enumerate(OPERATIONS[name].arguments) if argument.startswith("output")]
    with hc.new_group(backend="cpu:noting") as group:
        for dtype in (np.dtype(np.float64), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int32)):
            for op in reductions_of(dtype):
                if "scan" in name and op == "AVG":
                    continue
                part = layout(values_of(dtype, (3,), RANK))
                whole = layout(values_of(dtype, (SIZE, 3), RANK))
                everybody = [values_of(dtype, (3,), rank) for rank in range(SIZE)]
                parts = [values_of(dtype, (SIZE, 3), rank)[RANK] for rank in range(SIZE)]
                given = {
                    "scan": everybody[: RANK + 1], "exscan": everybody[:RANK] or None
                }.get(name, parts if outputs else everybody)  # fmt: skip
                expected = part.copy() if given is None else reduced(op, given)
                seen.clear()
                if name.startswith("reduce_scatter"):
                    inputs = whole if name != "reduce_scatter" else list(whole)
                    coalesced = name.endswith("coalesced")
                    args = ([part], [inputs]) if coalesced else (part, inputs)
                else:
                    args = ([part],) if name.endswith("coalesced") else (part,)
                options = {"dst": SIZE - 1} if name == "reduce" else {}
                getattr(hc, name)(*args, op=OPS[op][0], group=group, **options)
                if name != "reduce" or RANK == SIZE - 1:
                    assert_same(part, expected, name, op, dtype)
                ((*arguments, _),) = seen
                for argument in arguments:
                    for array in argument if isinstance(argument, list) else [argument]:
                        if isinstance(array, np.ndarray):
                            assert array.flags.c_contiguous
                            assert array.dtype == (np.float32 if dtype.itemsize == 2 else dtype)
                        elif isinstance(array, hc.ReduceOp):
                            assert array.name == {"AVG": "SUM", "PREMUL_SUM": "SUM"}.get(op, op)


@every_overlap
@pytest.mark.parametrize("name", ["reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"])
def test_an_override_may_write_its_outputs_before_it_reads(world: None, name: str, how: str) -> None:
    class Early(hc.BackendOverMPI):
        def reduce_scatter(self, output: Any, inputs: list[Any], op: Any, async_op: bool) -> Any:
            output[...] = -1
            return super().reduce_scatter(output, inputs, op, async_op)

        def reduce_scatter_single(self, output: Any, array: Any, op: Any, async_op: bool) -> Any:
            output[...] = -1
            return super().reduce_scatter_single(output, array, op, async_op)

    hc.register_backend("early", Early, devices="cpu", extended_api=True)
    with hc.new_group(backend="cpu:early") as group:
        for form in ("ordinary", "async"):
            share_memory(name, form, how, group)


def test_an_override_may_be_asynchronous_or_done_at_once(world: None) -> None:
    class AtOnce(hc.BackendOverMPI):
        def all_reduce(self, array: Any, op: Any, async_op: bool) -> None:
            self.mpi.all_reduce(array, op, False)

    class Later(hc.BackendOverMPI):
        def all_reduce(self, array: Any, op: Any, async_op: bool) -> hc.Work:
            work: hc.Work = self.mpi.all_reduce(array, op, True)
            return work

    for kind in (AtOnce, Later):
        name = kind.__name__.lower()
        hc.register_backend(name, kind, devices="cpu", extended_api=True)
        with hc.new_group(backend=f"cpu:{name}") as group:
            for async_op in (False, True):
                x = np.full((2, 4), RANK, np.float16)[:, ::2]
                work = hc.all_reduce(x, "avg", group=group, async_op=async_op)
                assert work is None or work.wait()
                assert_same(x, np.full((2, 2), (SIZE - 1) / 2, np.float16))


def test_what_a_subclass_of_a_subclass_does_not_override_is_its_parents(world: None) -> None:
    first, seen = noting("all_reduce")

    class Second(first):  # type: ignore[valid-type, misc]
        def broadcast(self, array: Any, root: int, async_op: bool) -> Any:
            seen.append(("broadcast",))
            return super().broadcast(array, root, async_op)

    hc.register_backend("second", Second, devices="cpu", extended_api=True)
    with hc.new_group(backend="cpu:second") as group:
        hc.all_reduce(np.ones(2), group=group)
        hc.broadcast(np.ones(2), src=0, group=group)
    assert [call[0] for call in seen[1:]] == ["broadcast"]
    assert len(seen) == 2


@pytest.mark.serial
def test_other_devices_are_refused() -> None:
    with pytest.raises(TypeError, match="Mine is a BackendOverMPI, which serves host arrays, not cuda arrays; reg"):
        type("Mine", (hc.BackendOverMPI,), {})(hc.BackendOptions(rank=0, size=1, device="cuda"))


@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_a_backend_that_overrides_nothing_is_mpi(world: None, dtype: Any) -> None:
    hc.register_backend("same", hc.BackendOverMPI, devices="cpu", extended_api=True)
    with hc.new_group(backend="cpu:same") as group:
        for op in reductions_of(dtype):
            x = values_of(dtype, (5,), RANK)
            hc.all_reduce(x, OPS[op][0], group=group)
            assert_same(x, reduced(op, [values_of(dtype, (5,), rank) for rank in range(SIZE)]))

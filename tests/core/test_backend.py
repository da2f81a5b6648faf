"""The registry, BackendConfig, and backends of a program's own."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core import arrays, registry
from hpccomm.core.operation_list import OF_GRIDS, OPERATIONS

from ..matrix.cases import GOOD, MESSAGES, function

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.fixture(autouse=True)
def _registries_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    monkeypatch.setattr(arrays, "_predicates", dict(arrays._predicates))
    yield
    if hc.is_initialized():
        hc.destroy_process_group()


class Noting(hc.Backend):
    """Notes what it is called with, and adds one to the array."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[str] = []
        self.closed = False

    def all_reduce(self, array: Any, op: Any, async_op: bool) -> hc.Work | None:
        self.calls.append("all_reduce")
        np.asarray(array.memory if hasattr(array, "memory") else array)[...] += 1
        return hc.CompletedWork() if async_op else None

    def barrier(self, async_op: bool) -> None:
        self.calls.append("barrier")  # complete at once, also when asked for async_op

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Any:
        work = hc.CompletedWork()  # asynchronous only
        work.source = 0
        return work

    def close(self) -> None:
        self.closed = True


class GPUArray:
    """What hpccomm looks at in a GPU array of a library that it does not know."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.dtype, self.size, self.shape = memory.dtype, memory.size, memory.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)  # kDLCUDA


def register(name: str, devices: Any = None) -> list[Noting]:
    made: list[Noting] = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Noting:
        assert (rank, size, timeout) == (RANK, SIZE, timedelta(minutes=30))
        assert isinstance(store, hc.Store)
        made.append(Noting(rank, size))
        return made[-1]

    hc.register_backend(name, create, devices=devices)
    return made


# -- BackendConfig -----------------------------------------------------------------------------------


@pytest.mark.serial
@pytest.mark.parametrize(
    ("text", "device_map"),
    [
        (None, {"cpu": "mpi", "cuda": "nccl"}),
        ("mpi", {"cpu": "mpi"}),
        (" MPI ", {"cpu": "mpi"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:mpi,cuda:nccl", {"cpu": "mpi", "cuda": "nccl"}),
        (" CPU : mpi ,\tcuda:NCCL ", {"cpu": "mpi", "cuda": "nccl"}),
        ("cuda:nccl", {"cuda": "nccl"}),
    ],
)
def test_good_configurations(text: str | None, device_map: dict[str, str]) -> None:
    config = hc.BackendConfig(text)
    assert config.device_map == device_map
    assert str(config) == ",".join(":".join(pair) for pair in device_map.items())
    assert repr(config) == f"BackendConfig('{config}')"


@pytest.mark.serial
@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("cpu:", "'cpu:' is not 'device:backend'"),
        (":mpi", "':mpi' is not 'device:backend'"),
        ("cpu:mpi:x", "'cpu:mpi:x' is not 'device:backend'"),
        ("cpu:mpi,cpu:nccl", "'cpu:nccl' maps 'cpu' a second time"),
        ("cpu:mpi,", "'' is not 'device:backend'"),
        ("cpu:mpi,nccl", "'nccl' is not 'device:backend'"),
        ("cpu:nope", "no backend is called 'nope'; the backends are mpi, nccl"),
        ("gpu9:mpi", "no device is called 'gpu9'; the devices are cpu, cuda, rocm"),
        ("", "no backend is called ''"),
        ("nope", "no backend is called 'nope'"),
    ],
)
def test_bad_configurations_show_the_bad_part_and_the_names_known(text: str, bad: str) -> None:
    for refuse in (hc.BackendConfig, hc.init_process_group):
        with pytest.raises(ValueError, match=bad) as caught:
            refuse(text)
        assert repr(text) in str(caught.value)
        assert "second time" in bad or ("mpi" in str(caught.value) or "cpu" in str(caught.value))
    assert not hc.is_initialized()
    with hc.init_process_group(), pytest.raises(ValueError, match=bad):
        hc.new_group(backend=text)


@pytest.mark.serial
def test_a_configuration_that_is_no_text() -> None:
    with pytest.raises(TypeError, match="backend is 3; expected a string such as"):
        hc.BackendConfig(3)  # type: ignore[arg-type]


# -- register_backend and register_device ------------------------------------------------------------


@pytest.mark.serial
def test_registering_again_is_refused() -> None:
    register("mine")
    for name in ("mine", " MINE", "mpi", "nccl"):
        with pytest.raises(ValueError, match="exists already; choose another name"):
            register(name)


@pytest.mark.serial
def test_bad_registrations() -> None:
    with pytest.raises(ValueError, match="'my backend' is not a backend name"):
        register("my backend")
    with pytest.raises(TypeError, match="creator is 3; expected a function that returns a Backend"):
        hc.register_backend("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no device is called 'gpu9'; the devices are cpu, cuda, rocm"):
        register("mine", devices=["cpu", "gpu9"])
    with pytest.raises(ValueError, match="'a device' is not a device name"):
        hc.register_device("a device", callable)
    with pytest.raises(ValueError, match="'cuda' exists already; the devices are cpu"):
        hc.register_device("cuda", callable)
    with pytest.raises(TypeError, match="predicate is 3; expected a function"):
        hc.register_device("fpga", 3)  # type: ignore[arg-type]
    assert "mine" not in registry.known_backends()


@pytest.mark.serial
def test_a_string_of_devices_is_one_device() -> None:
    register("mine", devices="cpu")
    assert hc.BackendConfig("mine").device_map == {"cpu": "mine"}
    register("both", devices=["cpu", "cuda"])
    assert hc.BackendConfig("both").device_map == {"cpu": "both", "cuda": "both"}
    register("all")
    assert hc.BackendConfig("all").device_map == dict.fromkeys(("cpu", "cuda", "rocm"), "all")


def test_custom_devices_dispatch_like_the_built_in_ones() -> None:
    class Tape(GPUArray):
        pass

    hc.register_device("tape", lambda array: isinstance(array, Tape))
    made = register("drive", devices="tape")
    assert hc.device_of(Tape(np.zeros(2))) == "tape"
    assert str(hc.BackendConfig()) == "cpu:mpi,cuda:nccl,tape:drive"  # every known device is mapped
    with hc.init_process_group():
        assert not made  # lazily
        array = Tape(np.zeros(2))
        hc.all_reduce(array)
        assert array.memory.tolist() == [1, 1]
        assert made[0].calls == ["all_reduce"]
        host = np.ones(1)
        hc.all_reduce(host)
        assert host[0] == SIZE
    assert made[0].closed
    with pytest.raises(ValueError, match="no device is called 'disk'; the devices are cpu, cuda, rocm, tape"):
        hc.BackendConfig("disk:mpi")


def test_one_group_two_devices() -> None:
    made = register("dummy")
    with hc.init_process_group("cpu:mpi,cuda:dummy") as group:
        host, device = np.ones(2), GPUArray(np.zeros(2))
        hc.all_reduce(host)
        assert not made
        hc.all_reduce(device)
        work = hc.all_reduce(device, async_op=True)
        assert work.result() is device
        assert host.tolist() == [SIZE] * 2
        assert device.memory.tolist() == [2, 2]
        assert len(made) == 1
        with pytest.raises(ValueError, match="output and input are on cpu and cuda; one call, one device"):
            hc.all_gather_single(np.ones(2 * SIZE), device)
        with pytest.raises(ValueError, match="arrays on cpu and cuda; one call, one device"):
            hc.all_reduce_coalesced([host, device])
        with pytest.raises(ValueError, match="array and output are on cuda and cpu"):
            hc.sendrecv(device, 0, host, 0)
        assert "cuda:dummy" in repr(group)


def test_two_custom_backends_are_two_instances() -> None:
    one, two = register("one"), register("two")
    with hc.init_process_group("cpu:one,cuda:two"):
        hc.all_reduce(np.zeros(1))
        hc.all_reduce(GPUArray(np.zeros(1)))
    assert (len(one), len(two)) == (1, 1)
    both = register("both")
    with hc.init_process_group("both"):
        hc.all_reduce(np.zeros(1))
        hc.all_reduce(GPUArray(np.zeros(1)))
    assert len(both) == 2
    assert both[0] is not both[1]


class Nothing(hc.Backend):
    """Has no operation at all."""


def has_form(name: str, form: str) -> bool:
    spec = OPERATIONS[name]
    return {"async": spec.is_asynchronous, "coalescing": spec.is_collected}.get(form, True) and (
        form != "persistent" or spec.is_persistent
    )


SHARED = {"empty_shared", "empty_symmetric", "fence"}
ABOVE = SHARED | OF_GRIDS | {"coalescing", "exchange_sparse", *(name for name in OPERATIONS if "object" in name)}
FORMS = ["ordinary", "async", "persistent", "coalescing"]
CALLS = [(name, form) for name in OPERATIONS if name not in ABOVE for form in FORMS if has_form(name, form)]


def test_what_a_backend_lacks_is_refused_by_the_name_of_what_was_called() -> None:
    hc.register_backend("nothing", lambda store, rank, size, timeout: Nothing(rank, size))
    with hc.init_process_group("nothing") as group:
        for name, form in CALLS:
            if name in MESSAGES and form == "ordinary" and SIZE == 1:
                continue  # a blocking message to this rank itself, which is refused
            if name == "redistribute" and SIZE == 1:
                continue  # what a rank has itself is copied
            called = function(name, form)
            fine = GOOD[name](group)
            options = dict(fine.options, **({"async_op": True} if form == "async" and name not in MESSAGES else {}))
            with (
                pytest.raises(hc.UnsupportedOperationError) as caught,
                hc.coalescing(group) if form == "coalescing" else nullcontext(),
            ):
                called(*fine.arguments, **options)
            text = "coalescing" if form == "coalescing" else called.__name__
            said = re.fullmatch(
                rf"{text}: backend 'nothing' does not have it \(Nothing\.(\w+) is not overridden\); "
                rf"use a group with another backend, for example new_group\(backend='cpu:mpi'\) \(rank {RANK}\)",
                str(caught.value),
            )
            assert said, (name, form, caught.value)
            lacking = said[1]
            assert callable(getattr(hc.Backend, lacking))
            if name == "all_reduce_sparse":  # whose entries are gathered
                assert lacking == "all_gather_single"
            elif name == "redistribute":  # which is made of messages
                assert lacking in ("recv", "send")
            else:
                assert lacking == name.removesuffix("_coalesced")
        for name, arguments in {"empty_shared": (3,), "fence": (np.ones(3),), "peer_view": (np.ones(3), 0)}.items():
            with pytest.raises(hc.UnsupportedOperationError, match=rf"^{name}: backend 'nothing' does not have it \(N"):
                getattr(hc, name)(*arguments)
    assert issubclass(hc.UnsupportedOperationError, NotImplementedError)


def test_forms_that_are_made_of_the_plain_operation() -> None:
    made = register("mine")
    with hc.init_process_group("mine") as group:
        a, b = np.zeros(2), np.zeros(3, np.float32)
        hc.all_reduce_coalesced([a, b])
        hc.all_reduce_coalesced([a, b], async_op=True).wait()
        with hc.coalescing():
            hc.all_reduce(a)
            hc.all_reduce(b)
        with hc.all_reduce_init(a) as reduction, hc.all_reduce_coalesced_init([a, b]) as both:
            for work in (reduction, both, both):
                work.start()
                assert work.wait()
        assert (a.tolist(), b.tolist()) == ([6, 6], [5, 5, 5])
        assert made[0].calls == ["all_reduce"] * 11
        assert group.sequence_number == 6


def test_what_a_backend_may_return() -> None:
    register("mine")
    with hc.init_process_group("mine"):
        assert hc.barrier() is None
        work = hc.barrier(async_op=True)  # the backend returned None: it was complete
        assert work is not None
        assert work.is_success()
        if RANK:  # a blocking receive of a backend that has only asynchronous ones
            assert hc.recv(np.ones(1), 0) == 0
        assert hc.irecv(np.ones(1), 0).source_rank() == 0


def test_an_asynchronous_receive_that_was_done_at_once_may_return_the_sender() -> None:
    class AtOnce(hc.Backend):
        def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> int:
            array[:] = 7
            return 1

    hc.register_backend("at_once", lambda store, rank, size, timeout: AtOnce(rank, size))
    with hc.init_process_group("at_once"):
        array = np.zeros(2)
        assert hc.irecv(array).wait()
        assert array.tolist() == [7, 7]


def test_the_extended_api() -> None:
    seen: list[hc.BackendOptions] = []

    def create(options: hc.BackendOptions, backend_options: Any) -> Noting:
        assert backend_options is None
        seen.append(options)
        return Noting(options.rank, options.size)

    hc.register_backend("extended", create, extended_api=True)
    with hc.init_process_group("cpu:mpi,cuda:extended", timeout=9, group_name="mine") as group:
        hc.all_reduce(GPUArray(np.zeros(1)))
        (options,) = seen
        assert (options.rank, options.size, options.ranks) == (RANK, SIZE, tuple(range(SIZE)))
        assert (options.device, options.group_name, options.timeout) == ("cuda", "mine", timedelta(seconds=9))
        assert options.comm is group.comm
        assert options.store is group.store


@pytest.mark.parametrize("made", [3, None, hc.Backend, hc.ProcessGroup(0, 1)])
def test_a_creator_that_returns_something_else(made: Any) -> None:
    hc.register_backend("strange", lambda *_: made)
    with pytest.raises(TypeError, match=r"creator of backend 'strange' returned .*; expected a Backend"):
        hc.init_process_group("strange")
    with hc.init_process_group("cpu:mpi,cuda:strange"), pytest.raises(TypeError, match="expected a Backend"):
        hc.all_reduce(GPUArray(np.ones(1)))


def test_errors_of_a_backend_reach_the_program() -> None:
    class Failing(hc.Backend):
        def all_reduce(self, array: Any, op: Any, async_op: bool) -> None:
            raise ConnectionError("cable pulled")

        def barrier(self, async_op: bool) -> None:
            raise ConnectionError("cable pulled")

        def translate_error(self, operation: str, error: Exception) -> Exception:
            return hc.DistBackendError(str(error), operation) if operation == "barrier" else error

    hc.register_backend("failing", lambda store, rank, size, timeout: Failing(rank, size))
    with hc.init_process_group("failing"):
        with pytest.raises(ConnectionError, match="cable pulled"):
            hc.all_reduce(np.ones(1))
        with pytest.raises(hc.DistBackendError, match=r"barrier #\d+ of 'world': cable pulled") as caught:
            hc.barrier()
        assert isinstance(caught.value.__cause__, ConnectionError)


# -- lazily, and what is not there -------------------------------------------------------------------


def test_a_device_without_a_backend() -> None:
    with hc.init_process_group("cuda:nccl"):
        with pytest.raises(
            hc.DistError, match=r"has no backend for cpu arrays; start with init_process_group\('cpu:mpi,cuda:nccl'\)"
        ):
            hc.all_reduce(np.ones(1))
        gathered: list[Any] = [None] * SIZE
        hc.all_gather_object(gathered, RANK)
        assert gathered == list(range(SIZE))


def test_backends_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        importlib.metadata.EntryPoint("Installed", "tests.core.test_backend:installed", "hpccomm.backends"),
        importlib.metadata.EntryPoint("broken", "tests.no_such_module:create", "hpccomm.backends"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    registry._announced_backends.cache_clear()
    try:
        assert hc.is_backend_available("installed")
        assert not hc.is_backend_available("broken")
        with hc.init_process_group("cpu:installed"):
            array = np.zeros(1)
            hc.all_reduce(array)
            assert array[0] == 1
        with (
            hc.init_process_group("cpu:mpi,cuda:broken"),
            pytest.raises(
                hc.DistBackendError, match="the 'broken' backend, which serves cuda arrays, can't be loaded: No module"
            ),
        ):
            hc.all_reduce(GPUArray(np.ones(1)))
    finally:
        registry._announced_backends.cache_clear()


def installed(options: hc.BackendOptions, _: Any) -> Noting:
    return Noting(options.rank, options.size)


@pytest.mark.serial
def test_the_mpi_backend_needs_a_communicator() -> None:
    from hpccomm.mpi import create

    with pytest.raises(TypeError, match="needs a group with an MPI communicator"):
        create(hc.BackendOptions(0, 1), None)

"""The store of a group: one for each, without a collective; and what init_process_group is told of it."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.api import world_store
from hpccomm.api.world_store import WorldStore
from hpccomm.job import mpi_library
from hpccomm.store import master, rendezvous
from hpccomm.store.rendezvous import Method

from ..launch import run_program

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


@pytest.fixture
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as world:
        yield world


@pytest.fixture
def no_world() -> Iterator[None]:
    """Let a test make a world of its own."""
    yield
    if hc.is_initialized():
        hc.destroy_process_group()


def test_every_rank_reads_what_another_has_set(world: hc.ProcessGroup) -> None:
    key = "test_every_rank"
    world.store.set(f"{key}/{RANK}", str(RANK * 10))
    for rank in range(SIZE):
        assert world.store.get(f"{key}/{rank}") == str(rank * 10).encode()


def test_asking_is_not_collective(world: hc.ProcessGroup) -> None:
    group = hc.new_group()
    if RANK == SIZE - 1:
        group.store.set("alone", b"I was here")
    hc.barrier(group)
    if RANK == 0:
        assert group.store.get("alone") == b"I was here"
    hc.destroy_process_group(group)


def test_tickets_are_unique(world: hc.ProcessGroup) -> None:
    tickets = [world.store.add("ticket", 1) for _ in range(20)]
    numbers: list[Any] = [None] * SIZE
    hc.all_gather_object(numbers, tickets)
    assert sorted(number for row in numbers for number in row) == list(range(1, 20 * SIZE + 1))
    hc.barrier()
    world.store.delete_key("ticket")


def test_groups_do_not_see_each_others_keys(world: hc.ProcessGroup) -> None:
    groups = [hc.new_group(), hc.new_group(), hc.split_group(color=0), hc.split_group(color=0, key=-RANK)]
    for i, group in enumerate(groups):
        if group.rank == 0:
            group.store.set("key", str(i))
    for i, group in enumerate(groups):
        assert group.store.get("key") == str(i).encode()
        assert group.store.list_keys() == ["key"]
    assert not world.store.check(["key"])
    hc.barrier()
    for group in groups:
        hc.destroy_process_group(group)


def test_a_group_of_some_ranks_has_one(world: hc.ProcessGroup) -> None:
    group = hc.split_group(color=RANK % 2)
    group.store.set(str(group.rank), f"{RANK % 2}")
    values = group.store.multi_get([str(rank) for rank in range(group.size)])
    assert values == [str(RANK % 2).encode()] * group.size


def test_it_is_made_once_and_has_the_groups_timeout(world: hc.ProcessGroup) -> None:
    group = hc.new_group(timeout=77.0)
    assert group.store is group.store
    assert group.store.timeout.total_seconds() == 77


def test_threads_do_not_wait_for_each_other(world: hc.ProcessGroup) -> None:
    key = f"threads/{RANK}"
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(world.store.get(key)))
    waiting.start()
    world.store.set(key, b"value")  # while the other one waits
    waiting.join(30)
    assert got == [b"value"]


def test_a_destroyed_group_has_none(world: hc.ProcessGroup) -> None:
    group = hc.new_group()
    store = group.store
    hc.destroy_process_group(group)
    with pytest.raises(hc.DistError, match="has been destroyed"):
        _ = group.store
    with pytest.raises(hc.DistStoreError, match="closed"):
        store.get("key")


def test_a_group_made_without_mpi_has_none() -> None:
    with pytest.raises(hc.DistStoreError, match="has no store: it was made without MPI"):
        _ = hc.ProcessGroup(0, 1).store


def test_a_group_on_a_communicator_has_one(world: hc.ProcessGroup) -> None:
    with hc.ProcessGroup.from_comm(WORLD) as group:
        group.store.set(str(RANK), b"")
        group.store.wait([str(rank) for rank in range(SIZE)])
    with hc.ProcessGroup.from_comm(MPI.COMM_SELF) as group:
        assert group.store.add("n", 1) == 1


@pytest.mark.parametrize("extended_api", [False, True])
def test_the_creator_of_a_backend_gets_it(world: hc.ProcessGroup, extended_api: bool) -> None:
    seen: list[list[bytes]] = []

    class Met(hc.Backend):
        def __init__(self, store: hc.Store, rank: int, size: int) -> None:
            super().__init__(rank, size)
            store.set(f"address of {rank}", f"host{rank}")
            seen.append(store.multi_get([f"address of {rank}" for rank in range(size)]))

        def barrier(self, device_ids: Any = None, async_op: bool = False) -> None:
            return None

    def create(options: hc.BackendOptions, _: Any) -> Met:
        return Met(options.store, options.rank, options.size)

    def create_as_c10d(store: hc.Store, rank: int, size: int, timeout: Any) -> Met:
        return Met(store, rank, size)

    name = f"meets_{'new' if extended_api else 'old'}"
    hc.register_backend(name, create if extended_api else create_as_c10d, devices="cpu", extended_api=extended_api)
    for config in (f"cpu:{name},cuda:nccl", name):
        group = hc.new_group(backend=config)
        hc.barrier(group)
        assert seen.pop() == [f"host{rank}".encode() for rank in range(SIZE)]
        hc.barrier()
        hc.destroy_process_group(group)


class TestInit:
    def test_a_store_of_the_programs_own(self, no_world: None, tmp_path: Path) -> None:
        path = WORLD.bcast(str(tmp_path / "store"))
        with hc.FileStore(path) as store:
            world = hc.init_process_group(store=store)
            world.store.set(str(RANK), b"value")
            world.store.wait([str(rank) for rank in range(SIZE)])
            hc.destroy_process_group()
            assert {*store.list_keys()} == {"worlds", *(f"world/1/{rank}" for rank in range(SIZE))}  # it is open
            with hc.init_process_group(store=store) as world:
                assert not world.store.num_keys()

    @pytest.mark.parametrize("method", ["tcp", "tcp with ranks", "file", "env", "env without address"])
    def test_init_methods_of_c10d(
        self, no_world: None, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listener = master.listen("localhost", 0)
        port = WORLD.bcast(listener.getsockname()[1])
        listener.close()
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if method.startswith("tcp"):
            ranks = f"?rank={RANK}&world_size={SIZE}" if "ranks" in method else ""
            url, kind = f"tcp://localhost:{port}{ranks}", f"TCPStore('localhost', {port})"
        elif method == "file":
            path = WORLD.bcast(str(tmp_path / "a store"))
            url, kind = f"file://{path.replace(' ', '%20')}", f"FileStore({path!r})"
        else:
            url, kind = "env://", ""
            monkeypatch.setenv("RANK", str(RANK))
            monkeypatch.setenv("WORLD_SIZE", str(SIZE))
            if method == "env":
                monkeypatch.setenv("MASTER_ADDR", "localhost")
                monkeypatch.setenv("MASTER_PORT", str(port))
                kind = f"TCPStore('localhost', {port})"
        world = hc.init_process_group(init_method=url)
        assert kind in repr(world.store)
        world.store.set(str(RANK), b"")
        world.store.wait([str(rank) for rank in range(SIZE)])

    def test_the_second_run_with_a_file_finds_no_keys_of_the_first(self, no_world: None, tmp_path: Path) -> None:
        path = Path(WORLD.bcast(str(tmp_path / "store")))
        for name in ("first", "second"):
            world = hc.init_process_group(init_method=f"file://{path}")
            world.store.set(f"{name} run, rank {RANK}", b"")
            hc.barrier()
            assert world.store.list_keys() == [f"{name} run, rank {rank}" for rank in range(SIZE)]
            hc.barrier()
            if name == "first" and RANK == 0:  # as a killed run would leave it
                os.link(path, path.with_suffix(".left"))
            hc.destroy_process_group()
            WORLD.Barrier()
            assert not path.exists()
            WORLD.Barrier()
            if name == "first" and RANK == 0:
                path.with_suffix(".left").rename(path)
            WORLD.Barrier()

    def test_every_rank_says_that_a_file_can_not_be_used(self, no_world: None, tmp_path: Path) -> None:
        with pytest.raises(hc.DistStoreError, match=r"init_process_group: FileStore: .* can't be opened: No such file"):
            hc.init_process_group(init_method=f"file://{tmp_path}/no/folder/store")

    @pytest.mark.parametrize(
        "url", ["", "env", "tcp://", "tcp://host", "tcp://host:port", "file://", "file://host/path", "mpi://", "x"]
    )
    def test_what_is_no_init_method(self, no_world: None, url: str) -> None:
        with pytest.raises(ValueError, match=r"init_method is .*; expected 'env://'"):
            hc.init_process_group(init_method=url)

    @pytest.mark.parametrize(("name", "value"), [("RANK", SIZE), ("WORLD_SIZE", SIZE + 1)])
    def test_what_contradicts_mpi(self, no_world: None, name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, str(value))
        with pytest.raises(ValueError, match=f"is {value} \\(by 'env://'\\), but MPI says"):
            hc.init_process_group(init_method="env://")

    def test_not_both(self, no_world: None) -> None:
        with pytest.raises(ValueError, match="both init_method and store are given"):
            hc.init_process_group(init_method="env://", store=hc.HashStore())
        with pytest.raises(TypeError, match="store is 'here'; expected a Store"):
            hc.init_process_group(store="here")  # type: ignore[arg-type]

    def test_where_rank_0_can_not_listen_every_rank_says_so(self, no_world: None) -> None:
        taken = master.listen("localhost", 0) if RANK == 0 else None
        port = WORLD.bcast(taken.getsockname()[1] if taken else None)
        with pytest.raises(hc.DistNetworkError, match=rf"can't listen at localhost, port {port}: .*in use"):
            hc.init_process_group(init_method=f"tcp://localhost:{port}")
        WORLD.Barrier()
        if taken:
            taken.close()

    def test_without_a_network_there_is_a_world_and_no_store(
        self, no_world: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_network(*_: object) -> None:
            raise hc.DistNetworkError("there is no network")

        monkeypatch.setattr(master, "serve", no_network)
        world = hc.init_process_group()
        if SIZE > 1:
            with pytest.raises(hc.DistStoreError, match="the groups have no store: there is no network"):
                _ = world.store
        else:
            assert world.store.add("n", 1) == 1


class TestAddress:
    def test_on_one_node_it_is_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HPCCOMM_STORE_HOST", raising=False)
        assert master.address_for(None) == "127.0.0.1"
        assert master.address_for(os.uname().nodename) == "127.0.0.1"

    def test_the_variable_overrides_it(self) -> None:
        assert master.address_for("node7", {"HPCCOMM_STORE_HOST": " 10.0.0.7 "}) == "10.0.0.7"

    def test_for_another_host_it_is_no_loopback(self) -> None:
        assert not master.address_for("no-such-host.invalid", {}).startswith("127.")

    def test_a_name_for_loopback_is_not_opened_to_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HPCCOMM_STORE_HOST", raising=False)
        real = socket.getaddrinfo

        def resolved(host: str, port: int, **options: Any) -> list[Any]:
            return real("127.0.1.1" if host == "this-host" else host, port, **options)

        monkeypatch.setattr(master.socket, "getaddrinfo", resolved)
        for host, expected in (("127.0.0.1", "127.0.0.1"), ("this-host", "127.0.1.1")):
            with master.listen(host, 0) as listener:
                assert listener.getsockname()[0] == expected
        asked: list[str] = []
        monkeypatch.setattr(master, "_route_to", lambda peer: asked.append(peer) or "127.0.0.1")
        for peer, told in ((None, "this-host"), ("node7", "127.0.0.1")):
            server, (host, _, _) = master.serve(("this-host", 0), peer)
            server.close()
            assert host == told
        assert asked == ["node7"]

    @pytest.mark.parametrize("nodes", [1, 2], ids=["a network each", "two nodes"])
    def test_ranks_of_two_nodes_or_networks_ask_for_the_address_between_them(
        self, nodes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str | None] = []
        real = master.address_for
        monkeypatch.setattr(master, "address_for", lambda peer: asked.append(peer) or real(None))
        rank_0_alone = [min(rank, 1) for rank in range(SIZE)]
        if nodes == 1:
            monkeypatch.setattr(mpi_library, "namespace", lambda _: f"net:[{rank_0_alone[RANK]}]")
        world_store.agreed(WORLD, rank_0_alone if nodes == 2 else [0] * SIZE).close()
        assert asked == ([os.uname().nodename] if RANK == 0 and SIZE > 1 else [])


def test_parsed_method() -> None:
    assert rendezvous.parsed("tcp://node1:29500?world_size=4") == Method(("node1", 29500), -1, 4)
    assert rendezvous.parsed("env://", {"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == Method(("a", 1))
    assert rendezvous.parsed("file:///scratch/a%20b?rank=0") == Method("/scratch/a b", 0)


@pytest.mark.parametrize(("files", "is_told"), [(1024, True), (9000, False), (resource.RLIM_INFINITY, False)])
def test_where_rank_0_may_open_too_few_files_it_says_what_to_type(
    files: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, files))
    world_store._tell_of_too_few_files(2000)
    assert len(caplog.messages) == is_told
    assert all("type `ulimit -Hn 2256` before the job is started" in message for message in caplog.messages)


def test_a_closed_world_store_says_so() -> None:
    store = WorldStore()
    store.open()
    store.close()
    with pytest.raises(hc.DistStoreError, match="the world has been destroyed"):
        store.open()


NO_KEY = """
import hpccomm as hc
world = hc.init_process_group()
world.store.set("key", "secret")
if world.rank == 0:
    store = world.store.underlying_store
    print(store)
    try:
        hc.TCPStore.at(store.host, store.port, b"the key of another job", 60).get("key")
    except hc.DistNetworkError as error:
        print(error)
hc.barrier()
hc.destroy_process_group()
"""


@pytest.mark.serial
def test_the_store_of_a_job_is_closed_to_others(tmp_path: Path) -> None:
    done = run_program(NO_KEY, tmp_path, 2, status=0)
    assert re.search(r"TCPStore\('@hpccomm-\w{32}', 0\)", done.stdout)  # no port that others could connect to
    assert re.search(r"has refused this process: this process has another key", done.stdout)

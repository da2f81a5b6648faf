"""Operations for monitoring systems: the text file for Prometheus, and OpenTelemetry's spans."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import hpccomm as hc
import hpccomm.debug

from ..launch import WATCHED, run_program, until


@pytest.fixture
def folder(process_group: hc.ProcessGroup) -> Iterator[Path]:
    """A folder that all ranks share."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        hc.broadcast_object_list(names, src=0)
        yield Path(names[0])
        hc.barrier()


def metrics(folder: Path) -> dict[tuple[str, str, str], float]:
    """Return the values of the only file, by counter, group and operation."""
    (file,) = folder.glob("hpccomm-*.prom")
    found = {}
    for family in text_string_to_metric_families(file.read_text()):
        assert family.type == "counter"
        for sample in family.samples:
            found[sample.name, sample.labels["group"], sample.labels["operation"]] = sample.value
    return found


def test_a_node_has_a_file_with_the_sums_of_its_ranks(process_group: hc.ProcessGroup, folder: Path) -> None:
    size, name = process_group.size, 'one "of\\ two\n'
    group = hc.new_group(group_desc=name)
    with hpccomm.debug.write_metrics(folder):
        for _ in range(3):
            hc.all_reduce(np.ones(100, np.float32))
        hc.all_reduce(np.ones(10), async_op=True).wait()
        hc.broadcast(np.ones(7, np.int16), src=0, group=group)
        hc.barrier(group)
    hc.barrier()
    found = metrics(folder)
    counts = {key[1:]: value for key, value in found.items() if key[0] == "hpccomm_operations_total"}
    nbytes = {key[1:]: value for key, value in found.items() if key[0] == "hpccomm_bytes_total"}
    seconds = {key[1:]: value for key, value in found.items() if key[0] == "hpccomm_seconds_total"}
    assert counts == {
        ("world", "all_reduce"): 4 * size, (name, "broadcast"): size, (name, "barrier"): size,
    }  # fmt: skip
    assert nbytes == {
        ("world", "all_reduce"): size * (3 * 400 + 80), (name, "broadcast"): size * 14, (name, "barrier"): 0,
    }  # fmt: skip
    assert seconds.keys() == counts.keys()
    assert min(seconds.values()) > 0


def test_the_file_is_replaced_while_the_program_runs(process_group: hc.ProcessGroup, folder: Path) -> None:
    with hpccomm.debug.write_metrics(folder, interval=0.05):
        for count in (1, 2):
            hc.all_reduce(np.ones(4))
            until(lambda: list(folder.glob("*.prom")), "file")
            key = "hpccomm_operations_total", "world", "all_reduce"
            until(lambda key=key, count=count: metrics(folder).get(key) == count * process_group.size, "count")
            hc.GroupMember.WORLD.comm.Barrier()  # not an operation of the group


OF_HPCCOMM = """
    import sys, numpy as np, hpccomm as hc, hpccomm.debug
    hpccomm.debug.write_metrics(sys.argv[1])
    with hc.init_process_group() as world:
        for _ in range(5):
            hc.all_reduce(np.ones(8))
    """
OF_MPI4PY = """
    import sys, numpy as np, hpccomm.debug
    from mpi4py import MPI
    hpccomm.debug.write_metrics(sys.argv[1])
    for _ in range(5):
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, np.ones(8))
    """


@pytest.mark.serial
@pytest.mark.parametrize(
    ("program", "by", "labels"),
    [(OF_HPCCOMM, (), ("world", "all_reduce")), (OF_MPI4PY, WATCHED, ("MPI_COMM_WORLD", "Allreduce"))],
    ids=["hpccomm", "mpi4py"],
)
def test_the_file_stays_when_the_program_has_ended(
    program: str, by: tuple[str, ...], labels: tuple[str, str], tmp_path: Path
) -> None:
    run_program(program, tmp_path, 2, tmp_path, by=by, status=0)
    found = metrics(tmp_path)
    assert found["hpccomm_operations_total", *labels] == 10
    assert found["hpccomm_bytes_total", *labels] == 10 * 64


@pytest.mark.once
def test_a_full_disk_ends_nothing_and_loses_no_totals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    group = hc.new_group(ranks=[hc.get_rank()], use_local_synchronization=True)

    def one_barrier() -> None:  # by a hook of its own, as on a rank of its own
        with hpccomm.debug.write_metrics(folder):
            hc.barrier(group)

    one_barrier()
    with monkeypatch.context() as patch:
        patch.setattr("json.dump", full)
        one_barrier()
    assert "hpccomm: metrics can't be written: [Errno 28] No space left on device" in capfd.readouterr().err
    one_barrier()
    assert metrics(folder)["hpccomm_operations_total", group.name, "barrier"] == 2
    group.destroy()


@pytest.mark.once
def test_metrics_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="expected an existing folder"):
        hpccomm.debug.write_metrics(tmp_path / "none")


@pytest.mark.once
@pytest.mark.parametrize(
    ("function", "package", "arguments"),
    [("write_metrics", "prometheus_client", (".",)), ("opentelemetry_spans", "opentelemetry.trace", ())],
)
def test_the_packages_are_optional(
    function: str, package: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'hpccomm\[metrics\]'"):
        getattr(hpccomm.debug, function)(*arguments)


def test_each_operation_has_a_span(process_group: hc.ProcessGroup) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a test")

    class Refuse:
        def begin(self, operation: Any) -> None:
            raise TypeError("not this one")

        def end(self, operation: Any) -> None:
            pass

    number = process_group.sequence_number + 2
    with hpccomm.debug.opentelemetry_spans(tracer):
        with tracer.start_as_current_span("step"):
            hc.all_reduce(np.ones(10))
        hc.broadcast(np.ones(3, np.int16), src=0, async_op=True).wait()
        with hpccomm.debug.register_hook(Refuse()), pytest.raises(TypeError, match="not this one"):
            hc.barrier()
    hc.barrier()
    finished = exporter.get_finished_spans()
    assert [each.name for each in finished] == ["all_reduce", "step", "broadcast", "barrier"]
    spans = {each.name: each for each in finished}
    assert spans["all_reduce"].parent.span_id == spans["step"].context.span_id
    assert spans["broadcast"].parent is None
    facts = {
        "group": "world",
        "number": number,
        "rank": process_group.rank,
        "device": "cpu",
        "bytes": 6,
        "is_async": True,
    }
    assert spans["broadcast"].attributes == {f"hpccomm.{name}": fact for name, fact in facts.items()}
    assert [name for name, each in spans.items() if not each.status.is_ok] == ["barrier"]
    assert spans["barrier"].events[0].name == "exception"

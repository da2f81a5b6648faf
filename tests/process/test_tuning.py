from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.process import settings
from hpccomm.process.tuning import Tuning, as_json, tuning

from ..launch import run_program

pytestmark = pytest.mark.serial


def test_without_variables_it_is_the_default() -> None:
    assert tuning({}) == Tuning()
    assert tuning({"HPCCOMM_TUNING": "", "HPCCOMM_SEGMENT_BYTES": ""}) == Tuning()


def test_a_file_and_a_variable(tmp_path: Path) -> None:
    table = Tuning(segment_bytes=1 << 20, shared_bytes=5)
    file = tmp_path / "tuning.json"
    file.write_text(as_json(table, {"ranks": 2}), encoding="utf-8")
    assert tuning({"HPCCOMM_TUNING": str(file)}) == table
    both = tuning({"HPCCOMM_TUNING": str(file), "HPCCOMM_SEGMENT_BYTES": "4096"})
    assert both._asdict() == {**table._asdict(), "segment_bytes": 4096}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "hpccomm bench --tune"),
        ("[]", "expected an object with segment_bytes"),
        ('{"segment": 1}', "nothing is called 'segment'; there are segment_bytes, reduce_scatter_bytes"),
        ('{"segment_bytes": 0}', "segment_bytes is 0; expected a number of bytes"),
        ('{"node_bytes": -1}', "node_bytes is -1; expected a number of bytes, 0 or more"),
        ('{"segment_bytes": 1.5}', "segment_bytes is 1.5"),
        ('{"shared_bytes": "many"}', "shared_bytes is 'many'"),
        ('{"thread_bytes": Infinity}', "thread_bytes is inf"),
        ('{"shared_chunk_bytes": 8}', "shared_chunk_bytes is below 64"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"^HPCCOMM_TUNING={file}: .*{message}"):
        tuning({"HPCCOMM_TUNING": str(file)})


def test_memory_of_the_node_can_be_switched_off(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text('{"node_bytes": 0}', encoding="utf-8")
    assert tuning({"HPCCOMM_TUNING": str(file)}).node_bytes == 0


def test_a_missing_file_and_a_bad_number_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"HPCCOMM_TUNING=.*No such file"):
        tuning({"HPCCOMM_TUNING": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="HPCCOMM_SEGMENT_BYTES is '4M'; expected a number of bytes, 1 or more"):
        tuning({"HPCCOMM_SEGMENT_BYTES": "4M"})


def test_rank_0_decides_for_all_ranks(tmp_path: Path) -> None:
    program = """
        import os, sys
        from mpi4py import MPI
        import numpy as np, hpccomm as hc
        from hpccomm.process import settings
        os.environ['HPCCOMM_SEGMENT_BYTES'] = str(64 * (MPI.COMM_WORLD.rank + 1))
        os.environ['HPCCOMM_GPU_PROVIDER'] = ['tests.gpu.stand_in', 'another'][MPI.COMM_WORLD.rank]
        with hc.init_process_group() as world:
            x = np.ones(1000)
            hc.all_reduce(x)
            assert (x == world.size).all()
            group = hc.new_group()
            said = world.tuning.segment_bytes, group.tuning.segment_bytes, settings.gpu_provider()
            sys.stdout.write('{} {} {}\\n'.format(*said))
        """
    done = run_program(program, tmp_path, 2, env={"HPCCOMM_TIMOUT": "3"})
    assert done.stdout.split("\n")[:2] == ["64 64 tests.gpu.stand_in"] * 2, done.stdout + done.stderr
    assert done.stderr.count("hpccomm: HPCCOMM_TIMOUT is none of hpccomm's variables") == 1, done.stderr


@pytest.mark.parametrize("name", ["os", "hpccomm", "hpccommx.seam", "cupy", "my.tests.stand_in", ".tests"])
def test_only_modules_of_hpccomm_and_its_tests_take_cupys_place(name: str) -> None:
    with pytest.raises(ValueError, match=r"HPCCOMM_GPU_PROVIDER is '.*'; expected a module of hpccomm or of its tests"):
        settings.gpu_provider({"HPCCOMM_GPU_PROVIDER": name})
    assert settings.gpu_provider({"HPCCOMM_GPU_PROVIDER": " tests.gpu.stand_in "}) == "tests.gpu.stand_in"
    assert settings.gpu_provider({}) == settings.gpu_provider({"HPCCOMM_GPU_PROVIDER": ""}) == ""


def test_a_bad_table_is_an_error_on_every_rank(tmp_path: Path) -> None:
    program = """
        import os, sys
        from mpi4py import MPI
        import hpccomm as hc
        os.environ['HPCCOMM_SEGMENT_BYTES'] = 'many' if MPI.COMM_WORLD.rank == 0 else '64'
        try:
            hc.init_process_group()
        except ValueError as error:
            sys.stdout.write(f'{error}\\n')
        """
    done = run_program(program, tmp_path, 2)
    assert done.stdout.count("HPCCOMM_SEGMENT_BYTES is 'many'") == 2, done.stdout + done.stderr


def test_all_groups_have_a_table(process_group: hc.ProcessGroup) -> None:
    assert process_group.tuning == Tuning()
    array = np.ones((Tuning().segment_bytes // 8 + 1, 2))  # a little more than two segments
    hc.all_reduce(array)
    assert (array == process_group.size).all()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("HPCCOMM_TIMOUT", "HPCCOMM_TIMEOUT"),
        ("HPCCOMM_DEBUGDIR", "HPCCOMM_DEBUG_DIR"),
        ("HPCCOMM_TRACESIZE", "HPCCOMM_TRACE_SIZE"),
        ("HPCCOMM_SEGMENTS", "HPCCOMM_SEGMENT_BYTES"),
    ],
)
def test_a_variable_that_is_none_of_ours_is_named_with_the_nearest(name: str, nearest: str) -> None:
    found = settings.unknown({name: "3", nearest: "3", "HPC": "3"})
    assert found == [f"{name} is none of hpccomm's variables, and is ignored; the nearest is {nearest}"]
    assert settings.unknown(dict.fromkeys(settings.VARIABLES, "1")) == []


def test_the_settings_of_a_process() -> None:
    assert settings.read({}, "a") == settings.Settings(debug_dir="a")
    found = settings.read({"HPCCOMM_INTRA_NODE": " host ", "HPCCOMM_BLOCKING_WAIT": "1", "HPCCOMM_CUDA_AWARE": "1"})
    assert (found.intra_node, found.blocking_wait, found.cuda_aware) == ("host", True, True)
    with pytest.raises(ValueError, match="HPCCOMM_INTRA_NODE is 'yes'; expected 0, 1 or host"):
        settings.read({"HPCCOMM_INTRA_NODE": "yes"})
    with pytest.raises(ValueError, match="HPCCOMM_BLOCKING_WAIT is '2'; expected 0 or 1"):
        settings.read({"HPCCOMM_BLOCKING_WAIT": "2"})

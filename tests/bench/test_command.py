"""The command line: accepted and refused arguments, and whole runs."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpccomm.bench import command, registry
from hpccomm.cli import main as cli
from hpccomm.native import fastpath
from hpccomm.process.tuning import tuning

from ..launch import clean_environment, launch, mpiexec_folder, run_program, time_limit

pytestmark = pytest.mark.once
BENCHMARKS = registry.load()


def bench(ranks: int, *arguments: str | Path, **options: Any) -> Any:
    return launch(ranks, sys.executable, "-m", "hpccomm", "bench", *arguments, **options)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("4m", 4 << 20), ("1G", 1 << 30), ("2MiB", 2 << 20), ("1.5k", 1536)]
)
def test_sizes_are_understood(text: str, nbytes: int) -> None:
    assert command.size(text) == nbytes


def test_sizes_go_from_the_smallest_to_the_largest() -> None:
    assert command.sizes_of(8, 100, 2) == [8, 16, 32, 64, 100]
    assert command.sizes_of(8, 8, 10) == [8]
    with pytest.raises(ValueError, match="0 < begin <= end"):
        command.sizes_of(16, 8, 2)


def test_contenders_are_understood() -> None:
    assert command.contenders("mpi4py, torch-gloo") == ["mpi4py", "torch-gloo"]
    assert command.contenders("none") == []
    with pytest.raises(argparse.ArgumentTypeError, match="'mvapich'; there are hpccomm, python, mpi4py, torch-"):
        command.contenders("mpi4py,mvapich")


def test_dtypes_are_understood() -> None:
    assert command.dtype("float64") == np.float64
    assert command.dtype("bfloat16").itemsize == 2
    for text in ("float63", "object", "S3"):
        with pytest.raises(argparse.ArgumentTypeError):
            command.dtype(text)


def test_words_for_many_operations() -> None:
    assert command.chosen([], BENCHMARKS) == ["all_reduce"]
    assert command.chosen(["messages", "ping_pong"], BENCHMARKS) == [
        "ping_pong",
        "sendrecv",
        "bidirectional",
        "message_rate",
    ]
    assert command.chosen(["all"], BENCHMARKS) == list(BENCHMARKS)
    with pytest.raises(ValueError, match="no operation 'allreduce'; did you mean all_reduce\\?"):
        command.chosen(["allreduce"], BENCHMARKS)
    assert command.chosen(["pairs"], BENCHMARKS) == ["pairs"]
    with pytest.raises(ValueError, match="pairs is measured alone: hpccomm bench pairs"):
        command.chosen(["all_reduce", "pairs"], BENCHMARKS)


def test_a_subcommand_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text(
        "def add_arguments(parser): parser.add_argument('--name')\ndef run(arguments): return len(arguments.name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("greeting", "say hello"))
    assert cli.main(["greet", "--name", "four"]) == 4


def test_one_process_of_a_job_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.is_first_process({})
    assert cli.is_first_process({"PMI_SIZE": "2", "PMI_RANK": "0"})
    assert not cli.is_first_process({"PMI_SIZE": "2", "PMI_RANK": "1"})


# -- whole runs ----------------------------------------------------------------------------------------------


def test_a_run_with_check_json_and_csv(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ended = bench(2, "all_reduce", "barrier", "-b", "8", "-e", "1K", "-f", "8", "-n", "3", "--check", "--csv",
                  "--json", file)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    sizes = [8, 64, 512, 1024, 0]
    assert [(int(row["size_bytes"]), row["contender"]) for row in rows] == [
        (size, contender) for size in sizes for contender in ("hpccomm", "mpi4py")
    ]
    assert {row["wrong"] for row in rows} == {"0"}
    document = json.loads(file.read_text())
    assert document["machine"]["ranks"] == 2
    assert [row["size_bytes"] for row in document["rows"]] == [size for size in sizes for _ in range(2)]
    assert str(tmp_path) not in file.read_text()


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    ended = bench(2, "ping_pong", "-b", "64", "-e", "64", "-n", "2", "--plot", picture)
    assert ended.returncode == 0, ended.stderr
    for words in ("ping_pong: Send", "mpi4py  ratio"):
        assert words in ended.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = bench(1, "ping_pong", "--plot", tmp_path / "bench.pngg")
    assert (refused.returncode, "bench.pngg: expected the ending" in refused.stderr) == (2, True), refused.stderr


def test_ctrl_c_keeps_the_rows_that_are_measured() -> None:
    command = [mpiexec_folder() / "mpiexec", "-n", "2", sys.executable, "-m", "hpccomm", "bench", "all_reduce"]
    with subprocess.Popen(
        [*command, "-b", "8", "-e", "16M", "-f", "2", "-n", "100"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        last_resort = threading.Timer(time_limit(100), job.kill)
        last_resort.start()
        assert job.stdout is not None
        read = iter(job.stdout)
        assert any(line.split()[:1] == ["8"] for line in read)  # larger sizes follow
        os.killpg(job.pid, signal.SIGINT)
        rest, said = [*read], job.stderr.read() if job.stderr else ""
        status = job.wait()
        last_resort.cancel()
    assert status != 0, (rest, said)
    assert "Traceback" not in said


def test_without_mpi_it_says_what_to_install() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "hpccomm", "bench", "barrier"],
        env={**clean_environment(), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("hpccomm bench: mpi4py can't load an MPI library")
    assert "pip install 'hpccomm[mpich]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_overhead_without_a_launcher(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*(sys.executable, "-m", "hpccomm", "bench", "--overhead", "-n", "2", "--batch", "10"),
         *("--json", tmp_path / "overhead.json")],
        env=clean_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ": 1 rank, 8 bytes, minimum of the repetitions" in ended.stdout
    first = json.loads((tmp_path / "overhead.json").read_text())["overhead"][0]
    assert first["operation"] == "all_reduce"
    assert first["ratio"] == pytest.approx(first["hpccomm_ns"] / first["mpi4py_ns"])


def test_overhead_of_messages_on_two_ranks() -> None:
    ended = bench(2, "--overhead", "-n", "2", "--batch", "2")
    assert ended.returncode == 0, ended.stderr
    title, columns, _, *rows, watchdog = ended.stdout.partition("\n\n")[2].splitlines()
    assert watchdog.startswith("the watchdog looks once in 1 s, for ")
    assert title.endswith(": 2 ranks, 8 bytes, median of the repetitions")
    paths = ["hpccomm", "added", "ratio"] if fastpath is None else ["compiled", "added", "ratio", "python", "added"]
    assert columns.split() == ["operation", "mpi4py", *paths, "recorder", "adds"]
    assert [row.split()[0] for row in rows][:5] == ["ping-pong:", "sendrecv", "isend", "halo:", "halo:"]
    assert any(row.startswith("monitored_barrier ") for row in rows[5:])


@pytest.mark.parametrize(("option", "module"), [(["--plot", "x.png"], "matplotlib")])
def test_what_is_missing_is_named(option: list[str], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command._problem(parser.parse_args(option)) is None
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command._problem(parser.parse_args(option)) == f"{option[0]} needs {module}: pip install 'hpccomm[cli]'"


def test_overhead_is_not_measured_on_more_ranks() -> None:
    world: Any = SimpleNamespace(size=3)
    found = command._problem_of_job(argparse.Namespace(overhead=True), world)
    assert found == "--overhead is measured on 1 rank (calls) or 2 (messages); this job has 3"


def test_a_failed_check_is_exit_status_1_on_every_rank(tmp_path: Path) -> None:
    program = """
        import os, sys
        os.getloadavg = lambda: (99999.0, 0.0, 0.0)
        from hpccomm.bench.contenders import hpccomm_calls
        from hpccomm.cli.main import main
        hpccomm_calls.HPCComm.broadcast = lambda *_: lambda: None
        sys.exit(main(['bench', 'broadcast', '-e', '8', '-n', '2', '--check']))
        """
    ended = run_program(program, tmp_path, 2, status=1)
    assert "WRONG: hpccomm, 8 bytes: 2 elements differ from NumPy's" in ended.stdout
    assert f"\n# load average 99999 on {os.cpu_count()} cores: other programs share them, so " in ended.stdout


REFUSED = {
    "--against mpi4py,nccl": "--against nccl: with --device cpu there are hpccomm, python, mpi4py, torch-",
    "--device cuda --against copy": "--against copy: with --device cuda there are hpccomm, cuda:mpi, ",
    "--device cuda --tune x": "--tune is for arrays of the host",
    "pairs --device cuda": "pairs is not measured on GPU arrays; leave --device cuda out",
    "nothing": "there is no operation 'nothing'; hpccomm bench --list shows",
    "--op max --dtype complex64": "--op max has no meaning for complex64",
    "-b 16 -e 8": "0 < begin <= end",
    "-e 64X": "argument -e/--end: '64X' is not a size, such as 8, 64K, 4M or 1G",
    "-f 1": "argument -f/--factor: '1' is not an integer of 2 or more",
    "--budget nan": "argument --budget: 'nan' is not a positive number of seconds",
    "--json /nowhere/result.json": "No such file or directory",
}


def test_what_can_not_be_done_is_exit_status_2_and_said_once(tmp_path: Path) -> None:
    program = """
        import sys
        from hpccomm.cli.main import main
        for arguments in sys.argv[1:]:
            try:
                status = main(['bench', *arguments.split()])
            except SystemExit as ended:
                status = ended.code
            assert status == 2, (arguments, status)
        """
    ended = run_program(program, tmp_path, 2, *REFUSED, status=0)
    for arguments, message in REFUSED.items():
        assert (ended.stdout + ended.stderr).count(message) == 1, arguments


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
def test_gpu_arrays_without_a_gpu_are_said_to_be_impossible_and_what_to_type() -> None:
    ended = bench(2, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 2
    assert ended.stderr.count("hpccomm bench: --device cuda: rank 0 has no usable GPU: ") == 1
    assert ended.stderr.count("hpccomm info --gpu shows what is missing. Without a GPU: --device cpu\n") == 1
    assert "Traceback" not in ended.stderr


def test_help_and_list_are_printed_once_and_start_no_mpi() -> None:
    for option, text in (("--help", "usage:"), ("--list", "collectives")):
        ended = bench(2, option)
        assert ended.returncode == 0
        assert ended.stdout.count(text) == 1
    program = (
        "import sys; from hpccomm.cli.main import main; main(['bench', '--list'])\n"
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=False, timeout=60).returncode
        == 0
    )


def test_tune_writes_what_programs_read(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    program = """
        import sys
        from functools import partial
        from hpccomm.bench.studies import tune
        from hpccomm.cli.main import main
        some, one = [1 << 20, 2 << 20], [1 << 20]
        tune.Sizes = partial(tune.Sizes, some, some, one, one, some, one, 1 << 20, one)
        sys.exit(main(['bench', '--tune', sys.argv[1], '-n', '1', '-w', '0', '--batch', '1']))
        """
    done = run_program(program, tmp_path, 2, file, status=0)
    assert "all_reduce in segments of (2 MiB):" in done.stdout
    assert f"export HPCCOMM_TUNING={file}" in done.stdout
    table = tuning({"HPCCOMM_TUNING": str(file)})
    assert f"segment_bytes          {table.segment_bytes}\n" in done.stdout
    assert (fastpath is None) == ("memory of the node: not measured" in done.stdout)
    assert json.loads(file.read_text(encoding="utf-8"))["measured"]["ranks"] == 2

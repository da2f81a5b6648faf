"""hpccomm checkpoint: what it says of folders, whole and damaged; exports, read as their users read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from hpccomm import checkpoint
from hpccomm.checkpoint import export, files
from hpccomm.checkpoint.local import local_folder
from hpccomm.cli.main import main

from ..arrays import assert_same
from ..checkpoints import flip
from ..faults.killed_while_saving import Alone
from ..launch import ROOT, clean_environment, launch
from . import saved_checkpoints as program

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 10 and 20, of three ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    ended = launch(program.RANKS, sys.executable, "-m", program.__name__, folder)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(saved, tmp_path / "copy")


def whole(step: int) -> dict[str, Any]:
    """The global arrays of a step, by NumPy."""
    parts = [program.part(step, rank) for rank in range(program.RANKS)]
    return {
        name: np.concatenate([part[name] for part in parts], program.AXES.get(name, 0)) for name in parts[0]
    } | program.REPLICATED


def a_file(folder: Path, step: int, rank: int) -> Path:
    (found,) = folder.glob(f"step-{step:010}-*/rank-{rank}.npy")
    return found


def command(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


# -- list and verify ---------------------------------------------------------------------------------


def test_a_table_of_what_is_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("list", "verify"):
        assert command(what, saved) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert head.split() == ["step", "where", "whole", "files", "ranks", "arrays", "size", "saved"]
        nbytes = sum(path.stat().st_size for path in saved.glob("step-*20-*/*"))
        for step, row in zip((10, 20), rows, strict=True):
            assert row.split()[:8] == [str(step), "folder", "yes", "3", "of", "3", "3", "10"]
            assert f"{nbytes / 1024:.4g} KiB" in row
            assert f" on {os.uname().nodename}" in row


def test_the_table_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nbytes = sum(path.stat().st_size for path in folder.glob("step-*20-*/*"))
    file = a_file(folder, 10, 1)
    file.unlink()
    for what in ("list", "verify"):
        assert command(what, folder, "--json") == 1
        first, last = json.loads(capsys.readouterr().out)
        assert (first["step"], first["files_there"], first["problems"]) == (10, 2, [f"{file} is missing"])
        assert last.pop("writer")["host"] == os.uname().nodename
        same = {"step": 20, "folder": str(folder), "problems": [], "files_there": 3, "files": 3, "ranks": 3}
        assert last == {**same, "arrays": 10, "bytes": nbytes}
    (folder / "step-0000000020.json").write_text("{}")
    assert command("list", folder, "--json") == 1
    _, last = json.loads(capsys.readouterr().out)
    assert set(last) == {"step", "folder", "problems"}


def test_every_flipped_bit_is_found_by_verify_and_none_by_list(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((folder / "step-0000000020.json").read_text())
    of_rank_1 = [
        shard["offset"]
        for described in manifest["arrays"].values()
        for shard in described["shards"]
        if shard["file"] == "rank-1.npy" and shard["length"]
    ]
    path = a_file(folder, 20, 1)
    for position in [*of_rank_1, -1]:
        flip(path, position)
        assert command("list", folder) == 0
        capsys.readouterr()
        assert command("verify", folder) == 1
        said = capsys.readouterr().out
        assert f"step 20: {path} is damaged: a checksum is wrong" in said
        assert "step 10:" not in said
        assert command("verify", folder, "--step", 10) == 0
        flip(path, position)
    assert command("verify", folder) == 0


def test_what_is_missing_short_or_unfinished_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, short = a_file(folder, 10, 2), a_file(folder, 20, 0)
    missing.unlink()
    os.truncate(short, size := short.stat().st_size - 1)
    (folder / "step-0000000030-0123abcd").mkdir()
    flip(folder / "step-0000000020.json", 40)
    assert command("list", folder) == 1
    said = capsys.readouterr().out
    assert f"step 10: {missing} is missing" in said
    assert "step 20: the manifest " in said
    assert "step 30: it has no manifest: its save has not ended, or was killed" in said
    flip(folder / "step-0000000020.json", 40)
    for what in ("list", "verify"):
        assert command(what, folder, *(["--step", 20] if what == "verify" else [])) == 1
        assert f"step 20: {short} has {size} bytes, not {size + 1}" in capsys.readouterr().out


def test_where_there_is_nothing(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", tmp_path / "none") == 2
    assert capsys.readouterr().err == f"hpccomm checkpoint: there is no checkpoint in {tmp_path / 'none'}\n"
    assert command("verify", saved, "--step", 15) == 2
    assert "there is no checkpoint of step 15 in " in capsys.readouterr().err


# -- two levels --------------------------------------------------------------------------------------


@pytest.fixture
def nodes(saved: Path, tmp_path: Path) -> list[Path]:
    """The storage of two pretended nodes, with step 20 of `tmp_path / "shared"`, in which step 10 is."""
    shared = shutil.copytree(saved, tmp_path / "shared")
    storage = [tmp_path / "node-0", tmp_path / "node-1"]
    for local, ranks in zip(storage, ((0, 2), (1, 2))):
        folder = local_folder(local, shared)
        data = folder / a_file(shared, 20, 0).parent.name
        data.mkdir(parents=True)
        for rank in ranks:
            shutil.copy(a_file(shared, 20, rank), data)
        holds = {"holds": [f"rank-{rank}.npy" for rank in ranks], "undrained": 1}
        body = files.read_manifest(shared, 20) | {"local": holds}
        (folder / "step-0000000020.json").write_bytes(files.sealed(body))
    shutil.rmtree(a_file(shared, 20, 0).parent)
    (shared / "step-0000000020.json").unlink()
    return storage


def test_what_is_on_a_node_is_listed_and_verified(
    nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what in ("list", "verify"):
        assert command(what, tmp_path / "shared", "--local", nodes[0]) == 0
        _, first, second = capsys.readouterr().out.splitlines()
        assert first.split()[:6] == ["10", "folder", "yes", "3", "of", "3"]
        assert second.split()[:6] == ["20", "node", "yes", "2", "of", "3"]
    assert command("drain", tmp_path / "shared", "--local", tmp_path / "nod") == 2
    assert f"there is no folder {tmp_path}/nod on this node" in capsys.readouterr().err
    flip(damaged := a_file(local_folder(nodes[0], tmp_path / "shared"), 20, 2), -1)
    assert command("verify", tmp_path / "shared", "--local", nodes[0], "--local", nodes[1]) == 1
    problems = capsys.readouterr().out.splitlines()[4:]
    assert problems == [f"step 20: {damaged} is damaged: a checksum is wrong"]


def test_each_node_drains_what_it_has_and_the_last_completes_the_step(
    nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    assert command("drain", shared, "--local", nodes[1]) == 0
    assert f"step 20: 2 of 3 files are in {shared}; others are on other nodes" in capsys.readouterr().out
    assert checkpoint.steps(shared) == [10]
    for _ in range(2):
        assert command("drain", shared, "--local", nodes[0]) == 0
        assert f"step 20 is in {shared}" in capsys.readouterr().out
    assert command("verify", shared) == 0
    assert "local" not in files.read_manifest(shared, 20)
    found = checkpoint.load(shared, group=Alone())
    for name, expected in whole(20).items():
        assert_same(native({**found.arrays, **found.replicated}[name]), expected, name)


def test_a_step_without_a_manifest_does_not_keep_earlier_ones_from_being_drained(
    nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, local = tmp_path / "shared", local_folder(nodes[0], tmp_path / "shared")
    whole_one = a_file(local, 20, 0).parent
    shutil.copytree(whole_one, whole_one.with_name(whole_one.name.replace("20-", "30-")))  # its save was killed
    assert command("drain", shared, "--local", nodes[1]) == 0
    assert command("drain", shared, "--local", nodes[0]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"step 20 is in {shared}"
    assert "step 30: it has no manifest: its save has not ended, or was killed; it is left out" in said.err
    assert checkpoint.latest(shared) == 20


def test_a_damaged_file_is_not_drained(nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared"
    flip(damaged := a_file(local_folder(nodes[0], shared), 20, 0), -1)
    for local in nodes:
        command("drain", shared, "--local", local)
    assert f"{damaged} is damaged: a checksum is wrong" in capsys.readouterr().err
    assert checkpoint.steps(shared) == [10]


def test_a_file_that_was_damaged_after_it_was_drained_is_drained_again(nodes: list[Path], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    assert command("drain", shared, "--local", nodes[1]) == 0
    (drained,) = shared.glob("step-0000000020-*/rank-2.npy")  # both nodes have it
    flip(drained, -1)
    assert command("drain", shared, "--local", nodes[0]) == 0
    assert command("verify", shared) == 0


def test_a_drain_whose_files_a_job_removes_leaves_no_manifest(
    nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, known = tmp_path / "shared", files.write_durably
    assert command("drain", shared, "--local", nodes[1]) == 0

    def overtaken(path: Path, *arguments: Any) -> int:
        if path.suffix == ".json":
            (data,) = shared.glob("step-0000000020-*")
            shutil.rmtree(data)
        return known(path, *arguments)

    monkeypatch.setattr(files, "write_durably", overtaken)
    assert command("drain", shared, "--local", nodes[0]) == 2
    assert "has been removed meanwhile: a job saves to" in capsys.readouterr().err
    assert checkpoint.steps(shared) == [10]
    assert checkpoint.load(shared, group=Alone()).step == 10


def test_an_export_from_the_storage_of_nodes(
    nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, output = tmp_path / "shared", tmp_path / "out.h5"
    assert command("export", shared, output, "--local", nodes[0]) == 2
    assert "step 20 is not whole: rank-1.npy is missing" in capsys.readouterr().err
    assert command("export", shared, output, "--local", nodes[0], "--local", nodes[1]) == 0
    check_hdf5(output, 20)


# -- export ------------------------------------------------------------------------------------------


def check_hdf5(path: Path, step: int) -> None:
    with h5py.File(path) as file:
        assert file.attrs["step"] == step
        assert file.attrs["ranks"] == program.RANKS
        assert json.loads(file.attrs["metadata"]) == program.METADATA
        for name, expected in whole(step).items():
            found = file[name]
            if expected.dtype.kind == "U":
                np.testing.assert_array_equal(found.asstr()[()], expected.astype(object))
            elif expected.dtype.kind == "M":
                assert_same(found[()].view(found.attrs["dtype"]), expected, name)
            else:
                assert_same(native(found[()]), standard(expected), name)
        velocity = file["flow"]["velocity"]
        assert velocity.attrs["axis"] == 1
        assert velocity.attrs["lengths"].tolist() == [2, 3, 4]


def check_zarr(path: Path, step: int) -> None:
    root = zarr.open(str(path), mode="r")
    assert dict(root.attrs) == {"step": step, "ranks": program.RANKS, "metadata": program.METADATA}
    for name, expected in whole(step).items():
        found = root[name]
        if expected.dtype.kind == "U":
            np.testing.assert_array_equal(np.asarray(found[...]).astype(object), expected.astype(object))
        else:
            assert_same(native(found[...]), standard(expected), name)
    assert dict(root["flow/velocity"].attrs) == {"axis": 1, "lengths": [2, 3, 4], "dtype": "<f8"}


CHECKS = {".h5": check_hdf5, ".hdf5": check_hdf5, ".zarr": check_zarr}


def standard(array: Any) -> Any:
    """What other programs see of bfloat16 and int4."""
    return array.astype({"bfloat16": np.float32, "int4": np.int8}.get(array.dtype.name, array.dtype))


def native(array: Any) -> Any:
    return np.asarray(array, np.asarray(array).dtype.newbyteorder("="))


@pytest.mark.parametrize("suffix", CHECKS)
@pytest.mark.parametrize("step", [None, 10])
def test_global_arrays_come_out_as_numpy_has_them(saved: Path, tmp_path: Path, suffix: str, step: int | None) -> None:
    output = tmp_path / f"out{suffix}"
    assert command("export", saved, output, *([] if step is None else ["--step", step])) == 0
    CHECKS[suffix](output, step or 20)
    assert os.listdir(tmp_path) == [output.name]


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_arrays_are_copied_in_pieces(saved: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest, read_part = 0, export.read_part

    def measured(*arguments: Any) -> Any:
        nonlocal largest
        part = read_part(*arguments)
        largest = max(largest, part.nbytes)
        return part

    monkeypatch.setattr(export, "PIECE", 200)
    monkeypatch.setattr(export, "CHUNK", 70)
    monkeypatch.setattr(export, "read_part", measured)
    output = tmp_path / f"out{suffix}"
    assert command("export", saved, output) == 0
    assert largest <= 200
    CHECKS[suffix](output, 20)


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_no_mpi_is_needed(saved: Path, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"out{suffix}"
    ended = subprocess.run(
        [sys.executable, "-m", "hpccomm", "checkpoint", "export", saved, output],
        cwd=ROOT,
        env={**clean_environment(), "MPI4PY_LIBMPI": "/there/is/none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    assert ended.stdout == f"{output}: 10 arrays of step 20\n"
    CHECKS[suffix](output, 20)


@pytest.mark.parametrize(("name", "suffix", "other"), [("h5py", ".h5", ".zarr"), ("zarr", ".zarr", ".h5")])
def test_a_library_that_is_missing_is_named(
    saved: Path, tmp_path: Path, name: str, suffix: str, other: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, name, None)
    assert command("export", saved, tmp_path / f"out{suffix}") == 2
    assert f"; pip install {name}, or choose a name that ends in {other}" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_a_damaged_file_leaves_no_export(
    folder: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / f"out{suffix}"
    flip(a_file(folder, 20, 2), -1)
    assert command("export", folder, output) == 2
    assert "is damaged: a checksum is wrong" in capsys.readouterr().err
    a_file(folder, 20, 1).unlink()
    assert command("export", folder, output) == 2
    assert "step 20 is not whole: rank-1.npy is missing; --step names another one" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [folder.name]
    assert command("export", folder, output, "--step", 10) == 0


def test_outputs_that_are_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.h5"
    there.write_bytes(b"mine")
    assert command("export", saved, there) == 2
    assert "is there already; remove it, or choose another name" in capsys.readouterr().err
    assert there.read_bytes() == b"mine"
    assert command("export", saved, tmp_path / "out.mat") == 2
    assert "has none of the endings .zarr, .h5, .hdf5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "suffix", "said"),
    [
        ({"a/b": 1, "a": 2}, ".h5", "'a' can't be an array and the group of the array 'a/b'"),
        ({"a//b": 1}, ".zarr", "the name 'a//b' of an array is no path"),
        ({"..": 1}, ".zarr", "the name '..' of an array is no path"),
        ({"x": np.longdouble(1)}, ".zarr", "choose a name that ends in .h5"),
        ({"x": np.zeros((), [("a", "U3")])}, ".h5", "choose a name that ends in .zarr"),
    ],
)
def test_what_a_format_can_not_hold(
    tmp_path: Path, arrays: dict[str, Any], suffix: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, {}, 1, replicated={k: np.asarray(v) for k, v in arrays.items()}, group=Alone())
    assert command("export", folder, tmp_path / f"out{suffix}") == 2
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == [folder.name]


def test_thousands_of_ranks_are_no_matter_for_attributes(tmp_path: Path) -> None:
    lengths = [1] * 20_000  # 160 kB of them; HDF5 before 1.8 had 64 KiB
    body = {"block": 8, "step": 1, "ranks": len(lengths), "metadata": {"text": "x" * 100_000}, "replicated": {}}
    shards = [{"file": "none", "offset": 0, "length": 0, "crc32": []} for _ in lengths]
    body["arrays"] = {"x": {"dtype": "<f8", "shape": [0], "axis": 0, "shards": shards}}
    for suffix in (".h5", ".zarr"):
        export.export(body, Path, tmp_path / f"out{suffix}")
    with h5py.File(tmp_path / "out.h5") as file:
        assert len(file["x"].attrs["lengths"]) == len(lengths)
        assert json.loads(file.attrs["metadata"]) == body["metadata"]

"""Which libnccl hpccomm calls, by whose bindings, and that these have the signatures it relies on."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpccomm.cuda import seam
from hpccomm.nccl import find, libnccl

from ..launch import ROOT, clean_environment
from . import gpus

pytestmark = [pytest.mark.once, pytest.mark.skipif(gpus.is_real(), reason="here is a libnccl")]
SOURCE = ROOT / "tests" / "gpu" / "fake_nccl" / "nccl.c"
VERSION = 99901  # of the fake
NAMES = {"ncclAlltoAll": "allto_all"}  # in nccl.bindings, where they are not snake_case


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnccl.so.2 that does nothing."""
    path = tmp_path_factory.mktemp("lib") / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", path, SOURCE], check=True, timeout=60)
    return path


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment["HPCCOMM_GPU_PROVIDER"] = ""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=clean_environment() | environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


PROGRAM = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from hpccomm.cuda import seam
nccl = seam.nccl()
comm = nccl.connect(1, nccl.unique_id(), 0, None)
for protocol, made in ((seam.NCCL, nccl), (seam.Communicator, comm)):
    for name in vars(protocol):
        assert name.startswith("_") or hasattr(made, name), name
comm.group_start()
comm.all_reduce(16, 32, 1, 7, 0, 0)
comm.group_end()
comm.split(0, 0, None).destroy()
memory = nccl.allocate(64)
comm.deregister_window(comm.register_window(memory, 64))
nccl.free(memory)
assert comm.handle
comm.destroy()
print(type(nccl).__module__, nccl.version())
from hpccomm.cli import info
print(info._nccl())
"""


@pytest.mark.parametrize(
    ("hidden", "expected", "told"),
    [
        ([], "nccl4py_nccl", "nccl4py"),
        (["nccl"], "cupy_nccl", "cupy.cuda.nccl"),
        (["nccl", "cupy.cuda.nccl", "cupy_backends.cuda.libs.nccl"], "libnccl", "ctypes"),
    ],
)
def test_the_first_bindings_that_are_there_are_used_and_have_the_functions_of_the_seam(
    library: Path, hidden: list[str], expected: str, told: str
) -> None:
    if "nccl" not in hidden and importlib.util.find_spec("nccl") is None:
        pytest.skip("nccl4py is not installed")
    ended = run(PROGRAM.format(hidden=hidden), HPCCOMM_NCCL_LIBRARY=str(library))
    assert ended.stdout.splitlines() == [
        f"hpccomm.nccl.{expected} {VERSION}",
        f"9.99.1, called by {told}, {library}",  # as hpccomm info
    ], ended.stderr


def test_a_file_that_is_not_there_is_named() -> None:
    ended = run(PROGRAM.format(hidden=["nccl"]), HPCCOMM_NCCL_LIBRARY="/no/libnccl.so")
    assert "HPCCOMM_NCCL_LIBRARY is '/no/libnccl.so', and there is no such file" in ended.stderr


def test_a_librccl_is_found_by_its_name(library: Path, tmp_path: Path) -> None:
    """Its functions have NCCL's names; that is all that is known here, and no AMD GPU has run it."""
    (tmp_path / "librccl.so.1").symlink_to(library)
    program = "from hpccomm.nccl import find, libnccl\nprint(libnccl.NCCL().version())"
    missing = run(program, PATH="/usr/bin")
    assert "there is no NCCL library (libnccl.so.2): pip install 'hpccomm[cuda13]'" in missing.stderr
    ended = run(program, LD_LIBRARY_PATH=str(tmp_path))
    assert ended.stdout.split() == [str(VERSION)], ended.stderr


def parameters(text: str) -> list[str]:
    """Return the parameters' names of the first line of a docstring of Cython's."""
    return [part.split()[-1].split("=")[0] for part in re.search(r"\((.*)\)", text.splitlines()[0])[1].split(", ")]  # type: ignore[index]


def test_nccl4py_takes_what_libnccl_takes() -> None:
    pytest.importorskip("nccl.bindings")
    from nccl.bindings import nccl

    pointers = {"sendbuff", "recvbuff", "stream", "comm", "buff", "ptr"}
    returned = {"ncclGetVersion", "ncclGetUniqueId", "ncclMemAlloc"}  # by nccl4py; called by ctypes only
    for name, types in libnccl.FUNCTIONS.items():
        if "Comm" in name or not types or name in returned:
            continue
        function = getattr(nccl, NAMES.get(name) or re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("nccl")).lower())
        found = parameters(function.__doc__)
        assert len(found) == len(types), name
        for parameter, kind in zip(found, types, strict=True):
            assert (parameter in pointers) == (kind is ctypes.c_void_p), f"{name}: {parameter}"


def test_the_seam_and_its_provider_by_ctypes_have_the_same_parameters() -> None:
    for protocol, made in ((seam.NCCL, libnccl.NCCL), (seam.Communicator, libnccl.Communicator)):
        for name, promised in inspect.getmembers(protocol, inspect.isfunction):
            found: Any = vars(made).get(name)
            if not name.startswith("_") and found is not None:
                assert [*inspect.signature(found).parameters] == [*inspect.signature(promised).parameters], name
    assert find.NAMES[0] == "libnccl.so.2"

"""A libnccl that does nothing, and as much of CUDA as hpccomm's way there needs: for the host's time, without a GPU.

`nccl.c` is compiled and loaded before CuPy looks for libnccl.so.2, and `provider` goes behind the seam. CuPy's bindings
and hpccomm's are then called as they are called on a GPU. This shows the host's time for hpccomm's calls:

    mpiexec -n 2 python -m tests.gpu.fake_nccl
"""

from __future__ import annotations

import ctypes
import importlib.resources
import os
import subprocess
import tempfile
from pathlib import Path

from hpccomm.cuda import seam

PROVIDER = "tests.gpu.fake_nccl.provider"
FLAGS = ["-shared", "-fPIC", "-O2", "-Wl,-soname,libnccl.so.2"]
SUBSTITUTED = (
    "over a fake libnccl: host time only, no GPU, nothing is communicated\n"
    "substituted: libnccl.so.2, by functions that return at once; and of CUDA, by functions that do nothing,\n"
    "because it needs a driver: the look-ups of the current GPU and stream, and all of streams, events, memory, copies"
)


def install() -> str | None:
    """Replace CUDA and NCCL by the fake in this process; or return the reason why that can't be done."""
    try:
        library = _load()
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", "")
        return f"no C compiler has made the fake libnccl ({error}{stderr}); install one, or name it: CC=gcc"
    os.environ["HPCCOMM_GPU_PROVIDER"] = PROVIDER
    try:
        version = seam.nccl().version()
    except ImportError as error:
        return str(error)
    if version != library.hpccomm_version():
        return f"another libnccl, {version}, is in use already"
    return None


def _load() -> ctypes.CDLL:
    """Compile and load: the loader knows the library by its soname from now on, and gives it to CuPy."""
    source = importlib.resources.files(__package__).joinpath("nccl.c").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libnccl.so.2")
        command = [os.environ.get("CC", "cc"), *FLAGS, "-o", str(path), "-xc", "-"]
        subprocess.run(command, input=source, capture_output=True, text=True, check=True, timeout=60)
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

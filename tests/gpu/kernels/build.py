"""hpccomm's kernels compiled as C++: their own text, but for five statements in PTX in cuda/intra_node.cu."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from hpccomm.cuda import copies

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-pthread", f"-I{HERE}"]
ALIGNED = ["-fsanitize=alignment", "-fno-sanitize-recover", "-static-libubsan"]  # a misaligned access ends the process
NEEDS = "needs a C++ compiler with _Float16 (g++ 12, clang 15)"

PTX = {
    r'asm\("cvt\.f32\.f16 %0, %1;" : "=f"\((\w+)\) : "h"\((\w+)\)\);': r"\1 = half_to_float(\2);",
    r'asm\("cvt\.rn\.f16\.f32 %0, %1;" : "=h"\((\w+)\) : "f"\((\w+)\)\);': r"\1 = float_to_half(\2);",
    r'asm volatile\("st\.release\.sys\.global\.u32 \[%0\], %1;" ::"l"\((\w+)\), "r"\((\w+)\) : "memory"\);': (
        r"store_release(\1, \2);"
    ),
    r'asm volatile\("ld\.acquire\.sys\.global\.u32 %0, \[%1\];" : "=r"\((\w+)\) : "l"\((\w+)\) : "memory"\);': (
        r"\1 = load_acquire(\2);"
    ),
    r'asm volatile\("ld\.global\.v4\.u32 .*" : "=r"\(x\), .* : "l"\((\w+)\)\);': (
        r"x = \1->x, y = \1->y, z = \1->z, w = \1->w;"
    ),
}


def text() -> str:
    """Return the kernels' text as C++."""
    kernels = Path(copies.__file__).with_name("intra_node.cu").read_text()
    for statement, replacement in PTX.items():
        kernels, count = re.subn(statement, replacement, kernels)
        assert count == 1, f"{statement} is there {count} times"
    assert "asm" not in kernels
    return f'#include "shim.h"\n{kernels}'


def compiled(source: str, folder: Path, *flags: str | Path, kernels: str = "", name: str = "intra_node") -> Path:
    """Compile a file of this folder, with this text of the kernels; CalledProcessError has the messages."""
    (folder / f"{name}.inc").write_text(kernels)
    output = folder / source.replace(".cpp", "")
    command = [COMPILER, *FLAGS, f"-I{folder}", "-o", output, HERE / source, *flags]
    subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    return output


@functools.cache
def is_available() -> bool:
    """Whether there is a compiler that can do it."""
    if shutil.which(COMPILER) is None:
        return False
    program = "_Float16 half(float x) { return (_Float16)x; }"
    command = [COMPILER, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0


@functools.cache
def library(ranks: int, rank: int) -> ctypes.CDLL:
    """Return the kernels of a rank as a library with the function `intra_node`."""
    flags = [f"-DSIZE={ranks}", f"-DME={rank}", "-O1", "-shared", "-fPIC", *ALIGNED]
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(compiled("entry.cpp", Path(folder), *flags, kernels=text())))


@functools.cache
def copying() -> ctypes.CDLL:
    """Return the kernel that copies many arrays as a library with the function `copies`, which ends if misaligned."""
    kernels = '#include "shim.h"\n' + Path(copies.__file__).with_suffix(".cu").read_text()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-O1", "-shared", "-fPIC", *ALIGNED]
        made = compiled("copies.cpp", Path(folder), *flags, kernels=kernels, name="copies")
        return ctypes.CDLL(str(made))

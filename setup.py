"""The README without the links that only work inside the repository, and the compiled extension."""

import re
import sys
from pathlib import Path

from setuptools import Extension, setup

README = Path(__file__).parent / "README.md"
LOCAL_LINK = re.compile(r"(?:!\[[^\]]+|\[([^\]]+))\]\((?!https?:)[^)]*\)")  # images go, with their descriptions


def modules():
    """Return the compiled extension modules: none where Cython is missing, no error where they can't be compiled."""
    try:
        import numpy
        from Cython.Build import cythonize
    except ImportError as error:  # an installation without isolation
        print(f"hpccomm: no compiled extension: {error}", file=sys.stderr)
        return []
    extensions = [
        Extension(
            f"hpccomm.native.{name}",
            [f"hpccomm/native/{name}.pyx"],
            include_dirs=[numpy.get_include()],
            libraries=["dl"],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
            extra_compile_args=["-O3", "-g0"],
        )
        for name in ("_fastpath", "_pieces", "_sums", "_gil_held")
    ]
    try:
        extensions = cythonize(extensions, build_dir="build")
    except Exception as error:  # that of a Cython older than pyproject.toml asks for
        print(f"hpccomm: no compiled extension: {error}", file=sys.stderr)
        return []
    for each in extensions:
        each.optional = True  # afterwards: cythonize makes an Extension of its own, without it
    return extensions


setup(
    long_description=LOCAL_LINK.sub(r"\1", README.read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    ext_modules=modules(),
)

"""Spack's package. In a repository of packages it is packages/py_hpccomm/package.py.

Not run: Spack has neither built nor tested it; only the syntax is checked. The sha256 of the archive is missing until
there is a release. A checkout: ``spack develop --path CHECKOUT py-hpccomm@0.1.0``.
"""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpccomm(PythonPackage):
    """torch.distributed's model of communication for NumPy and CuPy arrays, on MPI."""

    pypi = "hpccomm/hpccomm-0.1.0.tar.gz"

    license("BSD-3-Clause")

    version("0.1.0")

    depends_on("c", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cython@3.1:", type="build")
    depends_on("py-numpy@2:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))  # it brings the MPI

"""The extension module, compiled by MPI's compiler wrapper."""

import os

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

os.environ.setdefault("CXX", "mpicxx")
setup(ext_modules=[Pybind11Extension("compiled_backend.transport", ["compiled_backend/transport.cpp"], cxx_std=17)])

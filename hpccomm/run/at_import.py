"""Call a function when MPI is initialised: after a program's import of mpi4py.MPI, or after its MPI.Init.

Before that, the program may set `mpi4py.rc`, which mpi4py reads while it imports MPI.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import update_wrapper
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import mpi4py  # its own finder comes after this one

from ..job import mpi_library

NAME = f"{mpi4py.__name__}.MPI"


class AtImport:
    """A finder and loader of mpi4py.MPI that calls a function once, as soon as MPI is initialised."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._has_begun = False
        self._loader: Any = None  # mpi4py's own

    @property
    def waits(self) -> bool:
        """True until MPI is initialised."""
        return not self._has_begun

    def install(self) -> None:
        """Wait for the program's import; begin at once if MPI is imported already."""
        if NAME in sys.modules:
            self._when_initialised(sys.modules[NAME])
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Do not begin at later imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the other finders' spec with this loader; the caller may not import the module."""
        if name != NAME:
            return None
        self.remove()
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.install()
        if spec is not None:
            self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        """Create the module with mpi4py's own loader."""
        mpi_library.prepare()
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with mpi4py's own loader, which initialises MPI unless `mpi4py.rc` says otherwise."""
        self.remove()
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        vars(mpi4py)["MPI"] = module
        spec._initializing = False  # other threads need not wait for the rest
        self._when_initialised(module)

    def _when_initialised(self, mpi: Any) -> None:
        if mpi.Is_initialized():
            self._has_begun = True
            self._begin()
            return
        own = mpi.Init, mpi.Init_thread

        def beginning(initialise: Callable[..., Any]) -> Callable[..., Any]:
            def initialising(*arguments: Any, **named: Any) -> Any:
                outcome = initialise(*arguments, **named)
                mpi.Init, mpi.Init_thread = own
                self._when_initialised(mpi)
                return outcome

            return update_wrapper(initialising, initialise)

        mpi.Init, mpi.Init_thread = map(beginning, own)

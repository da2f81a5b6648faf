"""Run a program as the module ``__main__``, like the command ``python``.

Unlike `runpy`'s, the module stays in `sys.modules`: threads and `atexit` functions may pickle its classes.
"""

from __future__ import annotations

import io
import linecache
import os
import pkgutil
import runpy
import sys
from types import ModuleType


class CantOpenError(Exception):
    """The program's file can't be read; the message is Python's own."""


def folder_of(path: str) -> str:
    """Return the first entry of sys.path for ``python PATH``."""
    return _absolute(path) if _holds_main(path) else os.path.dirname(os.path.realpath(path))


def run_file(path: str) -> None:
    """Run ``python PATH``: a file, or a folder or archive with a ``__main__.py``; its `folder_of` is on sys.path."""
    if _holds_main(path):
        _run_found("__main__", names_itself=False)
    elif path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
    else:
        file = _absolute(path)
        try:
            with io.open_code(file) as source:
                text = source.read()
        except OSError as error:
            why = f"[Errno {error.errno}] {error.strerror}"
            raise CantOpenError(f"{sys.executable}: can't open file {file!r}: {why}") from error
        _run_source(text, file, __file__=file)


def run_module(name: str) -> None:
    """Run ``python -m NAME``."""
    _run_found(name, names_itself=True)


def run_code(code: str) -> None:
    """Run ``python -c CODE``."""
    sys.argv[0] = "-c"
    linecache.cache["<string>"] = len(code), None, code.splitlines(keepends=True), "<string>"
    _run_source(code, "<string>")


def _absolute(path: str) -> str:
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # "." and ".." stay, as in Python itself


def _holds_main(path: str) -> bool:
    return pkgutil.get_importer(path) is not None


def _run_found(name: str, names_itself: bool) -> None:
    """Run a module on sys.path; if it `names_itself`, sys.argv[0] becomes its file."""
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(name, names_itself)  # type: ignore[attr-defined]  # `python -m` calls it


def _run_source(source: str | bytes, file: str, **names: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(names)
    exec(compile(source, file, "exec", dont_inherit=True), vars(main))

"""Debuggers of ``hpccomm run``: debugpy (``--debugpy``), and pdb after an uncaught exception (``--pdb``).

Launchers give stdin to one rank at most, so pdb is served through a Unix socket. This module, run as a program, is its
client: ``python -m hpccomm.run.debugger SOCKET``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pdb
import select
import shutil
import socket
import sys
import tempfile
from types import TracebackType

from ..process.stderr import tell

TIME_LIMIT = 86400  # seconds of a job with a debugger: other ranks wait for the stopped one


def is_installed() -> bool:
    """Return whether debugpy can be imported."""
    try:
        return importlib.util.find_spec("debugpy") is not None
    except ValueError:  # sys.modules has None for it
        return False


def wait_for_client(rank: int) -> None:
    """Listen for a client of debugpy, on a free port of this node only, and wait for it."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # otherwise it warns of Python's frozen modules
    debugpy = importlib.import_module("debugpy")
    host, port = debugpy.listen(("127.0.0.1", 0))
    tell(f"hpccomm: rank {rank} waits for a client of debugpy at {host}:{port} on {socket.gethostname()}")
    debugpy.wait_for_client()


def post_mortem(rank: int, error: BaseException, trace: TracebackType | None) -> None:
    """Serve pdb at the place of an exception, to one client of this user, until the client ends it."""
    folder = tempfile.mkdtemp(prefix="hpccomm-pdb-")  # only this user may enter it
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path := os.path.join(folder, f"rank-{rank}"))
            server.listen(1)
            what = f"{type(error).__name__}: {error}"
            command = f"{sys.executable} -m {__spec__.name} {path}"
            tell(f"hpccomm: rank {rank} stops in pdb: {what}\nhpccomm: type on {socket.gethostname()}: {command}")
            client, _ = server.accept()
            with client, client.makefile("r") as typed, client.makefile("w") as shown:
                print(what, file=shown)
                debugger = pdb.Pdb(stdin=typed, stdout=shown)
                debugger.reset()
                debugger.interaction(None, trace)
    except OSError as ended:  # the client has gone
        tell(f"hpccomm: rank {rank}: pdb ends: {ended}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def connect(path: str) -> None:
    """Pass stdin to a pdb that a rank serves, and its answers to stdout, until it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        files = {server.fileno(), 0}
        while server.fileno() in files:
            for file in select.select(files, [], [])[0]:
                if not (data := os.read(file, 1 << 16)):
                    files.remove(file)
                    server.shutdown(socket.SHUT_WR)
                elif file:
                    os.write(1, data)
                else:
                    server.sendall(data)


if __name__ == "__main__":
    connect(sys.argv[1])

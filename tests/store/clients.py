"""Many client processes of one master, as a test starts them: HOST PORT CLIENTS PAIRS; the exit status is 0 or 1.

Each sets and gets its own keys and reads what its neighbour has set; all of them count on one counter.
"""

from __future__ import annotations

import os
import sys

import hpccomm as hc

from .master import KEY


def client(host: str, port: int, me: int, clients: int, pairs: int) -> None:
    """Do it all; an assertion says what was lost."""
    with hc.TCPStore(host, port, auth_key=KEY, timeout=100) as store:
        neighbour = (me + 1) % clients
        for number in range(pairs):
            store.set(f"{me}/{number}", f"{me} says {number}")
            assert store.get(f"{me}/{number}") == f"{me} says {number}".encode()
            store.add("count", 1)
        for number in range(pairs):
            assert store.get(f"{neighbour}/{number}") == f"{neighbour} says {number}".encode()


def main(host: str, port: int, clients: int, pairs: int) -> int:
    """Fork, so that the interpreter starts once."""
    children = []
    for me in range(clients):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                client(host, port, me, clients, pairs)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))

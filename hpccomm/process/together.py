"""Last messages of the ranks of a node that fail at the same time: equal ones are printed once, ``[ranks 0-3]``.

The first rank that fails listens on a socket for a moment, and other ranks of the node send it their messages. It
prints all of them and answers; a rank that gets no answer prints its own. No MPI calls: MPI may be broken.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from .. import errors
from .environment import placement
from .proc import of_process
from .settings import LAUNCHERS, folder_at_start

QUIET = 0.2  # seconds without another failure on this node, after which the first rank prints
LOOK = 0.02  # seconds between two checks for dead ranks
LONGEST_ANSWER = 5.0  # seconds to wait for the rank that prints
CREDENTIALS = struct.Struct("3i")  # process, user, group (unix(7), SO_PEERCRED)

Value = TypeVar("Value", bound=Hashable)


class Words(NamedTuple):
    """A rank's message: lines to print after a ``[rank 0]`` prefix, and a sentence with a placeholder ``{ranks}``."""

    lines: str
    sentence: str

    def of(self, names: str) -> str:
        """Return the text to print for `names`, such as ``ranks 0-3``."""
        text = "".join(f"[{names}] {line}\n" for line in self.lines.splitlines())
        return text + self.sentence.replace("{ranks}", names)


@contextlib.contextmanager
def said_once(words: Words) -> Iterator[list[str]]:
    """Yield the texts to print in the block: one failing rank of the node gets those of all, the others get none.

    The other ranks continue when the block has ended.
    """
    rank = errors._rank
    mine = [words.of(f"rank {rank}")]
    address = f"\0hpccomm-errors-{os.path.basename(folder_at_start())}"
    listener = connection = None
    with contextlib.ExitStack() as opened:
        try:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(address)
            listener.listen(1 << 12)
        except (OSError, AttributeError):  # another rank was first, or the system lacks such sockets
            listener = None
        if not isinstance(rank, int):
            yield mine
        elif listener is not None:
            said, connections = _collect(listener, rank, words, opened)
            by_words = ranks_by_value(sorted(said))
            yield [each.of(ranks_in_words(ranks)) for each, ranks in by_words.items()] if len(said) > 1 else mine
            for connection in connections:
                with contextlib.suppress(OSError):  # the other rank has died
                    connection.send(b"!")
        else:
            yield [] if _is_said_by_another(address, rank, words) else mine


def _without_rank(rank: int, words: Words) -> Words:
    """Remove the rank from the end of hpccomm's messages, so that equal messages compare equal."""
    return Words(words.lines.replace(f" (rank {rank})", ""), words.sentence)


def _collect(
    listener: socket.socket, rank: int, words: Words, opened: contextlib.ExitStack
) -> tuple[list[tuple[int, Words]], list[socket.socket]]:
    """Collect messages until all ranks of this node have sent one or `QUIET` is over; return them and connections."""
    place, connections = placement(), []
    expected = place.local_size if place is not None else None
    said = [(rank, _without_rank(rank, words))]
    until = time.monotonic() + QUIET
    while len(said) != expected and _are_there(expected) and (left := until - time.monotonic()) > 0:
        listener.settimeout(min(left, LOOK))
        with contextlib.suppress(OSError, ValueError, TypeError):  # no rank has connected, or it has died
            connection = opened.enter_context(listener.accept()[0])
            connection.settimeout(QUIET)
            if _user_of(connection) == os.getuid():
                with connection.makefile("r", encoding="utf-8") as file:
                    other, lines, sentence = json.load(file)
                said.append((int(other), Words(str(lines), str(sentence))))
                connections.append(connection)
                until = time.monotonic() + QUIET
    return said, connections


def _are_there(expected: int | None) -> bool:
    """Whether all ranks of this node seem to be alive: when one has died, the launcher ends the others."""
    parent, states = os.getppid(), []
    with contextlib.suppress(OSError):
        if expected is not None and of_process(parent)[0].startswith(LAUNCHERS):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    states += [of_process(child)[1][0] for child in file.read().split()]
            return len([state for state in states if state not in "ZX"]) >= expected
    return True


def _is_said_by_another(address: str, rank: int, words: Words) -> bool:
    """Send the message to the collecting rank; return whether that rank has printed it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(LONGEST_ANSWER)
        until = time.monotonic() + QUIET
        while connection.connect_ex(address) == errno.ECONNREFUSED and time.monotonic() < until:
            time.sleep(LOOK / 10)  # that rank has bound the address, and does not listen yet
        if _user_of(connection) == os.getuid():
            connection.sendall(json.dumps([rank, *_without_rank(rank, words)]).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"!"
    return False


def _user_of(connection: socket.socket) -> int:
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(user)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    several = len(spans) > 1 or any(len(span) > 1 for span in spans)
    return f"rank{'s' * several} {', '.join('-'.join(map(str, span)) for span in spans)}"


def ranks_by_value(pairs: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Return the ranks of each value, from pairs (rank, value)."""
    ranks_of: dict[Value, list[int]] = {}
    for rank, value in pairs:
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of

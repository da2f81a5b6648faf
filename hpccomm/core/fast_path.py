"""FastPath: what a transport with very short calls may offer beside its Backend."""

from __future__ import annotations

from typing import Any


class FastPath:
    """Blocking operations on NumPy arrays in the ordinary case, for a backend whose calls take about a microsecond.

    The group asks here before it checks anything. A method does the whole operation and returns True (a receive: the
    rank the message came from), or does nothing and returns False (None): then the operation goes through the
    checks to the backend. This class leaves all of them to the backend.
    """

    def broadcast(self, array: Any, root: int) -> bool:
        return False

    def all_reduce(self, array: Any, op: Any) -> bool:
        return False

    def reduce(self, array: Any, root: int, op: Any) -> bool:
        return False

    def all_gather_single(self, output: Any, array: Any) -> bool:
        return False

    def reduce_scatter_single(self, output: Any, array: Any, op: Any) -> bool:
        return False

    def all_to_all_single(self, output: Any, array: Any) -> bool:
        return False

    def send(self, array: Any, dst: int, tag: int) -> bool:
        return False

    def recv(self, array: Any, src: int | None, tag: int) -> int | None:
        return None

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int | None
    ) -> int | None:
        return None

from collections.abc import Sequence
from typing import TypeAlias

Layout: TypeAlias = tuple[int, ...]
Packed: TypeAlias = tuple[int, Layout, int, Layout, Layout, tuple[int, int]]
Direct: TypeAlias = tuple[int, Layout, int, Layout, Layout, int, int]
Partner: TypeAlias = tuple[int, int, int, Sequence[Direct], Sequence[Direct]]

class Pieces:
    number: int
    def __init__(
        self, sent: Sequence[Packed], received: Sequence[Packed], partners: Sequence[Partner], sleepers: int
    ) -> None: ...
    def start(self) -> None: ...
    def go_on(self, looks: int) -> bool: ...
    def sleep(self) -> None: ...
    def unpack(self) -> int: ...

def walk(
    shape: Layout, itemsize: int, a_strides: Layout, b_strides: Layout
) -> tuple[int, list[tuple[int, int, int]]]: ...

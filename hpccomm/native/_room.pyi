from collections.abc import Callable
from typing import Any

class FastPath:
    def __init__(
        self,
        comm: int,
        rank: int,
        size: int,
        windows: dict[int, Any],
        largest: int,
        largest_async: int,
        largest_tag: int,
        usual_op: Any,
        work_class: type[Pending],
    ) -> None: ...
    def use_node(self, largest: int, before: int) -> None: ...
    def map_node(self, address: int, slot: int, one_phase: int, looks: int) -> None: ...
    def differing(self, name: str) -> Exception: ...

class Pending: ...

def node_memory(ranks: int, slot: int) -> int: ...
def set_up(
    path: str,
    names: dict[str, Any],
    exception: Callable[[int], Exception],
    length: Callable[[str, int, int], Exception],
    difference: Callable[[str, int], Exception],
) -> None: ...
def set_up_works(in_flight: Any, completed: Any, flight: Any, work: type, reap_above: int) -> None: ...

"""The list of operations: the name, the arguments and the forms of each.

Hooks get the names of an operation's arguments from it, `NonMember` its methods, the documentation its table
(``docs/guide/operations.md``), and the tests their matrix. Adding an operation begins with a line here.
"""

from __future__ import annotations

from typing import NamedTuple


class OperationSpec(NamedTuple):
    """One operation."""

    name: str  # in `hpccomm`, in `ProcessGroup` and in `Backend`
    arguments: tuple[str, ...]  # in the order of the method of `Backend`
    summary: str
    is_asynchronous: bool  # it takes ``async_op``
    is_collected: bool  # by a coalescing() block
    is_persistent: bool  # there is a ``*_init`` form
    alike: tuple[str, ...]  # the arrays whose dtypes and sizes are the same on every rank; of others only the dtype is
    is_unlike: bool = False  # not even that: each rank gives the arrays that it wants to

    @property
    def has_equal_counts(self) -> bool:
        """True if all arrays together have the same number of elements on every rank."""
        return bool(self.alike) and {*self.arguments} <= {*self.alike, "root", "op"}

    @property
    def reduces(self) -> bool:
        """True if it combines the ranks' arrays by a ReduceOp."""
        return "op" in self.arguments

    @property
    def is_a_message(self) -> bool:
        """True if it is between two ranks. So is a task: the call has come from rank 0."""
        return self.name == "task" or "dst" in self.arguments or "src" in self.arguments


def _spec(name: str, arguments: str, summary: str, forms: str = "async") -> OperationSpec:
    words, names = forms.split(), arguments.replace("*", "").split()
    alike = tuple(each[:-1] for each in arguments.split() if each.endswith("*"))
    is_asynchronous, is_collected, is_persistent = (form in words for form in ("async", "collected", "persistent"))
    is_unlike = "unlike" in words
    return OperationSpec(name, tuple(names), summary, is_asynchronous, is_collected, is_persistent, alike, is_unlike)


OPERATIONS: dict[str, OperationSpec] = {
    spec.name: spec
    for spec in (
        _spec("broadcast", "array* root", "one rank's array to all", "async collected persistent"),
        _spec("all_reduce", "array* op", "the reduction, on every rank", "async collected persistent"),
        _spec("reduce", "array* root op", "the reduction, on one rank"),
        _spec("scan", "array* op", "the reduction over ranks 0 to this one"),
        _spec("exscan", "array* op", "the reduction over the ranks before this one"),
        _spec("all_gather", "outputs* array", "every rank's array, in a list, on every rank"),
        _spec("all_gather_single", "output* array*", "the same, in one array", "async collected persistent"),
        _spec("gather", "array outputs root", "every rank's array, in a list, on one rank"),
        _spec("scatter", "output inputs root", "one array of one rank's list to each rank"),
        _spec("reduce_scatter", "output inputs* op", "the reduction of the r-th arrays, on rank r"),
        _spec("reduce_scatter_single", "output* array* op", "the same, of one array", "async collected persistent"),
        _spec("all_to_all", "outputs inputs", "one array from each rank to each rank"),
        _spec(
            "all_to_all_single",
            "output array output_counts input_counts",
            "the same, with parts of one array",
            "async persistent",
        ),
        _spec("all_reduce_coalesced", "arrays* op", "all_reduce of many arrays at once", "async persistent"),
        _spec("broadcast_coalesced", "arrays* root", "broadcast of many arrays at once"),
        _spec("all_gather_coalesced", "output_lists* arrays", "all_gather of many arrays at once"),
        _spec("all_gather_single_coalesced", "outputs* arrays*", "all_gather_single of many arrays at once"),
        _spec("reduce_scatter_single_coalesced", "outputs* arrays* op", "reduce_scatter_single of many arrays at once"),
        _spec("all_reduce_sparse", "matrix op", "the sum of sparse matrices: what all_reduce does with one"),
        _spec("send", "array dst tag", "a message to one rank (isend)", "async persistent"),
        _spec("recv", "array src tag", "a message from one rank, or from any (irecv)", "async persistent"),
        _spec("sendrecv", "array dst output src tag recv_tag", "a message each way at once"),
        _spec(
            "halo_exchange",
            "arrays width axes corners",
            "ghost cells, from the neighbours in a grid",
            "async persistent",
        ),
        _spec(
            "halo_accumulate",
            "arrays width axes corners",
            "the reverse: ghosts are added to their owners",
            "async persistent",
        ),
        _spec(
            "redistribute",
            "output array output_box input_box",
            "from one layout of boxes to another",
            "async persistent",
        ),
        _spec("all_to_all_sparse", "arrays", "arrays to some ranks, which do not know of it", "async unlike"),
        _spec("barrier", "", "every rank has arrived"),
        _spec("monitored_barrier", "timeout wait_all_ranks", "the same, or who is missing", ""),
        _spec("all_gather_object", "obj", "every rank's Python object, on every rank"),
        _spec("gather_object", "obj root", "every rank's Python object, on one rank"),
        _spec("broadcast_object_list", "objects root", "one rank's Python objects to all"),
        _spec("scatter_object_list", "objects root", "one Python object of one rank's list to each rank"),
        _spec("send_object_list", "objects dst tag", "Python objects to one rank"),
        _spec("recv_object_list", "src tag", "Python objects from one rank, or from any"),
        _spec("empty_shared", "shape dtype", "an array that the ranks of a node share", ""),
        _spec("empty_symmetric", "shape dtype", "an array in memory that the GPUs of the group share", ""),
        _spec("fence", "array", "what was written to a node-shared array is there for all", ""),
        _spec("coalescing", "calls*", "what a coalescing() block has collected"),
    )
}

TASK = _spec("task", "call", "a call that rank 0 of an executor has sent to this rank", "")  # no function of ours

OF_GRIDS = {"halo_exchange", "halo_accumulate"}  # which other groups have not

OF_SEVERAL = {"redistribute"}  # before which the ranks gather what they need to know of each other

START = "_start"  # the end of the name of a persistent operation's start: "all_reduce_start"

CALLED = {  # the function that a program has called, by operation and `async_op`, where it has another name
    ("send", True): "isend",
    ("recv", True): "irecv",
    ("all_reduce_sparse", False): "all_reduce",
    ("all_reduce_sparse", True): "all_reduce",
}

# Between two ranks, and so numbered apart; all others are called by every rank of the group, in the same order.
MESSAGES = {name + form for name, spec in OPERATIONS.items() if spec.is_a_message for form in ("", START)} | {TASK.name}
# Among the arguments: of the rank at the other end (of the receiver, where there are two), and of the tag.
PLACES_OF_PEER_AND_TAG = {
    name: (spec.arguments.index("dst" if "dst" in spec.arguments else "src"), spec.arguments.index("tag"))
    for name, spec in OPERATIONS.items()
    if "tag" in spec.arguments
}

"""The list of operations: the name, the arguments and the forms of each.

It provides the argument names for hooks, the methods of `NonMember`, the table of the documentation
(``docs/reference/operations.md``), and the matrix of the tests. Adding an operation begins with a line here.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple


class Role(NamedTuple):
    """The role of one argument of an operation."""

    # arrays: in, out, inout, from_root, to_root; other arguments: root, op, prefix_op (not AVG), peer, any_peer (None:
    # any rank), tag, value, splits (an array's rows for each rank)
    kind: str
    name: str  # in the method of `Backend`, and in hooks
    shown: str  # in the public function, and in messages
    form: str = "one"  # one array, or a list of arrays: one for each rank (each), many, or many for each rank (lists)
    is_alike: bool = False  # its dtype and size are the same on every rank; otherwise only the dtype

    @property
    def is_array(self) -> bool:
        """True if it is an array or a list of arrays."""
        return self.kind in ("in", "out", "inout", "from_root", "to_root")

    def is_read(self, is_root: bool = True) -> bool:
        """Return True if the operation reads its arrays, on the root or on another rank."""
        return self.kind in ("in", "inout", "to_root") or (self.kind == "from_root" and is_root)

    def is_written(self, is_root: bool = True) -> bool:
        """Return True if the operation writes its arrays, on the root or on another rank."""
        return self.kind in ("out", "inout") or self.kind == ("to_root" if is_root else "from_root")


class OperationSpec(NamedTuple):
    """One operation."""

    name: str  # in `hpccomm`, in `ProcessGroup` and in `Backend`
    arguments: tuple[str, ...]  # in the order of the method of `Backend`
    summary: str = ""  # the contract of every backend: the docstring of its method
    is_asynchronous: bool = False  # it takes ``async_op``
    is_collected: bool = False  # a coalescing() block can collect it
    is_persistent: bool = False  # it has a ``*_init`` form
    is_unlike: bool = False  # even the dtypes may differ: each rank passes any arrays
    roles: tuple[Role, ...] = ()  # of the arguments, in order
    sizes: str = ""  # the rule for the numbers of elements: "output = n * array", or "outputs[rank] = array"

    @property
    def alike(self) -> tuple[str, ...]:
        """The arrays with equal dtypes and sizes on all ranks."""
        return tuple(role.name for role in self.roles if role.is_alike)

    @property
    def source(self) -> Role:
        """The argument whose arrays the operation reads."""
        return next(role for role in self.roles if role.is_read())

    @property
    def target(self) -> Role:
        """The argument whose arrays the operation writes: the same as `source` if it works in place."""
        return next(role for role in self.roles if role.is_written())

    @property
    def has_equal_counts(self) -> bool:
        """True if the arrays have the same total number of elements on every rank."""
        return bool(self.alike) and {*self.arguments} <= {*self.alike, "root", "op"}

    @property
    def reduces(self) -> bool:
        """True if it combines the ranks' arrays by a ReduceOp."""
        return "op" in self.arguments

    @property
    def is_a_message(self) -> bool:
        """True if it is between two ranks, as is a task, which rank 0 has sent."""
        return self.name == "task" or "dst" in self.arguments or "src" in self.arguments


def _role(text: str) -> Role:
    """Return the role of a text such as ``"out each outputs*:output_list"``; the star sets `is_alike`."""
    kind, *form, named = text.split()
    name, _, shown = named.partition(":")
    return Role(kind, name.rstrip("*"), shown or name.rstrip("*"), form[0] if form else "one", name.endswith("*"))


def _spec(name: str, arguments: str, summary: str, forms: str = "async", sizes: str = "") -> OperationSpec:
    has, roles = forms.split(), tuple(map(_role, filter(None, arguments.split(", "))))
    names = tuple(role.name for role in roles)
    is_asynchronous, is_collected, is_persistent, is_unlike = (
        form in has for form in ("async", "collected", "persistent", "unlike")
    )
    return OperationSpec(name, names, summary, is_asynchronous, is_collected, is_persistent, is_unlike, roles, sizes)


OPERATIONS: dict[str, OperationSpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "broadcast",
            "from_root array*, root root",
            "Copy `array` of rank `root` into `array` of every rank",
            "async collected persistent",
        ),
        _spec(
            "all_reduce", "inout array*, op op", "Reduce `array` over the ranks, in place", "async collected persistent"
        ),
        _spec(
            "reduce",
            "to_root array*, root root, op op",
            "Reduce `array` over the ranks, in place on rank `root`; on other ranks it is only read",
        ),
        _spec("scan", "inout array*, prefix_op op", "Reduce `array` over ranks 0 to this one, in place"),
        _spec(
            "exscan",
            "inout array*, prefix_op op",
            "Reduce `array` over the ranks before this one, in place; rank 0's is unchanged",
        ),
        _spec(
            "all_gather",
            "out each outputs*:output_list, in array",
            "Copy `array` of rank r into `outputs[r]` of every rank; sizes may differ between ranks",
            sizes="outputs[rank] = array",
        ),
        _spec(
            "all_gather_single",
            "out output*, in array*:input",
            "Copy each rank's `array`, in rank order, into `output`, which is `size` times as large",
            "async collected persistent",
            "output = n * array",
        ),
        _spec(
            "gather",
            "in array, out each outputs:gather_list, root root",
            "Copy `array` of rank r into `outputs[r]` of rank `root`; `outputs` is None elsewhere",
            sizes="outputs[rank] = array",
        ),
        _spec(
            "scatter",
            "out output, in each inputs:scatter_list, root root",
            "Copy `inputs[r]` of rank `root` into `output` of rank r; `inputs` is None elsewhere",
            sizes="inputs[rank] = output",
        ),
        _spec(
            "reduce_scatter",
            "out output, in each inputs*:input_list, op op",
            "Reduce `inputs[r]` over the ranks into `output` of rank r",
            sizes="inputs[rank] = output",
        ),
        _spec(
            "reduce_scatter_single",
            "out output*, in array*:input, op op",
            "Reduce the r-th equal part of `array` over the ranks into `output` of rank r",
            "async collected persistent",
            "array = n * output",
        ),
        _spec(
            "all_to_all",
            "out each outputs:output_list, in each inputs:input_list",
            "Copy `inputs[r]` of rank s into `outputs[s]` of rank r",
            sizes="outputs[rank] = inputs[rank]",
        ),
        _spec(
            "all_to_all_single",
            "out output, in array:input, splits output_counts:output_split_sizes, "
            "splits input_counts:input_split_sizes",
            "Send `input_counts[r]` elements of `array` to rank r, receive into `output`; None: equal parts",
            "async persistent",
        ),
        _spec(
            "all_reduce_coalesced",
            "inout many arrays*, op op",
            "Reduce each of `arrays` in place, in one message per dtype",
            "async persistent",
        ),
        _spec("broadcast_coalesced", "from_root many arrays*, root root", "Broadcast all of `arrays` in one message"),
        _spec(
            "all_gather_coalesced",
            "out lists output_lists*, in many arrays",
            "Copy `arrays[i]` of rank r into `output_lists[r][i]` of every rank, in one message",
        ),
        _spec(
            "all_gather_single_coalesced",
            "out many outputs*, in many arrays*:inputs",
            "Do all_gather_single for each pair of `outputs` and `arrays`, in one message",
            sizes="outputs = n * arrays",
        ),
        _spec(
            "reduce_scatter_single_coalesced",
            "out many outputs*, in many arrays*:inputs, op op",
            "Do reduce_scatter_single for each pair of `outputs` and `arrays`, in one message per dtype",
            sizes="arrays = n * outputs",
        ),
        _spec("all_reduce_sparse", "value matrix, op op", "Add sparse matrices; all_reduce calls it for one"),
        _spec("send", "in array, peer dst, tag tag", "Send `array` to rank `dst` (isend)", "async persistent"),
        _spec(
            "recv",
            "out array, any_peer src, tag tag",
            "Receive into `array` from rank `src` (None: any rank); without `async_op` return the sender's rank",
            "async persistent",
        ),
        _spec(
            "sendrecv",
            "in array, peer dst, out output, any_peer src, tag tag, tag recv_tag",
            "Send `array` to `dst` and receive `output` from `src` at once; the result is that of `recv`",
        ),
        _spec(
            "halo_exchange",
            "inout many arrays, value width, value axes, value corners",
            "Fill the ghost cells of `arrays` from the neighbours in a grid",
            "async persistent",
        ),
        _spec(
            "halo_accumulate",
            "inout many arrays, value width, value axes, value corners",
            "Add the ghost cells of `arrays` to their owners: the reverse of halo_exchange",
            "async persistent",
        ),
        _spec(
            "redistribute",
            "out output, in array, value output_box, value input_box",
            "Change from one layout of boxes to another",
            "async persistent",
        ),
        _spec(
            "exchange_sparse",
            "value arrays",
            "Send arrays to some ranks, which need not expect them",
            "async unlike",
        ),
        _spec("barrier", "", "Block until every rank has called it"),
        _spec(
            "monitored_barrier",
            "value timeout, value wait_all_ranks",
            "Block until every rank has called it, or raise DistTimeoutError with the missing ranks",
            "",
        ),
        _spec("all_gather_object", "value obj", "Copy every rank's Python object to every rank"),
        _spec("gather_object", "value obj, root root", "Copy every rank's Python object to one rank"),
        _spec("broadcast_object_list", "value objects, root root", "Copy one rank's Python objects to all"),
        _spec(
            "scatter_object_list", "value objects, root root", "Copy one Python object of one rank's list to each rank"
        ),
        _spec("send_object_list", "value objects, peer dst, tag tag", "Send Python objects to one rank"),
        _spec("recv_object_list", "any_peer src, tag tag", "Receive Python objects from one rank, or from any"),
        _spec(
            "empty_shared",
            "value shape, value dtype",
            "Make an array on each rank, in memory shared by the ranks of its node",
            "",
        ),
        _spec(
            "empty_symmetric",
            "value shape, value dtype",
            "Make an array on each rank, in GPU memory that NCCL has registered as symmetric",
            "",
        ),
        _spec("fence", "value array", "Make the ranks' writes to the node-shared `array` visible to all of them", ""),
        _spec("coalescing", "value calls*", "Run the calls that a coalescing() block has collected"),
    )
}

TASK = _spec("task", "value call", "a call that rank 0 of an executor has sent to this rank", "")  # no public function

OF_GRIDS = {"halo_exchange", "halo_accumulate"}  # only grids have them

OF_SEVERAL = {"redistribute"}  # the ranks first gather information about each other

START = "_start"  # the end of the name of a persistent operation's start: "all_reduce_start"

CALLED = {  # the public function of an operation, by name and `async_op`, if its name differs
    ("send", True): "isend",
    ("recv", True): "irecv",
    ("all_reduce_sparse", False): "all_reduce",
    ("all_reduce_sparse", True): "all_reduce",
}

# Operations between two ranks, numbered separately; all ranks of a group call the others in the same order.
MESSAGES = {name + form for name, spec in OPERATIONS.items() if spec.is_a_message for form in ("", START)} | {TASK.name}
# Functions that return, from the arguments, the rank at the other end (of sendrecv, the receiver) and the tag.
PEER_AND_TAG = {
    name: itemgetter(spec.arguments.index("dst" if "dst" in spec.arguments else "src"), spec.arguments.index("tag"))
    for name, spec in OPERATIONS.items()
    if "tag" in spec.arguments
}

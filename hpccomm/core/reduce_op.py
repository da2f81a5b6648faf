"""ReduceOp: the reductions, and the dtypes that each accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from ..errors import on_rank

if TYPE_CHECKING:
    from mpi4py import MPI

    Name = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "prod", "mean", "reproducible_sum"]
    UpperName = Literal[
        "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PROD", "MEAN", "REPRODUCIBLE_SUM"
    ]  # fmt: skip
ReduceOpLike: TypeAlias = "ReduceOp | MPI.Op | Name | UpperName"


class ReduceOp:
    """A reduction: ``ReduceOp.SUM``, ``AVG``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR``, ``BXOR``.

    ``ReduceOp.PREMUL_SUM(factor)`` multiplies each rank's array by `factor` before the sum.
    ``ReduceOp.REPRODUCIBLE_SUM`` rounds once, at the end, so the result does not depend on the order of the ranks.
    `all_reduce`, `reduce`, `reduce_scatter`, `reduce_scatter_single`, `scan` and `exscan` accept it. Every
    function with an argument `op` also accepts its name as a string, in either case (``"sum"``), and, for
    host arrays, any ``mpi4py.MPI.Op``.

    ================ ===========================================================
    op               dtypes
    ================ ===========================================================
    SUM PRODUCT      bool (as OR, AND), integers, floating point, complex
    AVG              floating point, complex
    MIN MAX          bool (as AND, OR), integers, floating point
    BAND BOR         bool, integers
    BXOR             bool, integers
    PREMUL_SUM       integers (with an integer factor), floating point, complex
    REPRODUCIBLE_SUM integers, floating point, complex; no longdouble
    ================ ===========================================================

    For bool the results are those of ``np.add``, ``np.multiply``, ``np.minimum`` ... on bool arrays.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> hc.all_reduce(x, hc.ReduceOp.PREMUL_SUM(0.5))
    >>> x  # on 4 ranks: array([2., 4.])
    array([0.5, 1. ])
    >>> hc.all_reduce(x, "max")
    >>> x
    array([0.5, 1. ])
    """

    __slots__ = ("factor", "kinds", "mpi_op", "name")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    REPRODUCIBLE_SUM: ClassVar[ReduceOp]

    def __new__(cls, name: Any, kinds: str = "", *_: Any) -> ReduceOp:
        """Return a new op; without `kinds` the one that `name` stands for: ``ReduceOp("sum")`` is ``ReduceOp.SUM``."""
        return super().__new__(cls) if kinds else as_reduce_op("ReduceOp", name)

    def __init__(self, name: Any, kinds: str = "", factor: Any = None, mpi_op: MPI.Op | None = None) -> None:
        if not kinds:
            return
        self.name: str = name
        self.kinds = kinds  # accepted dtypes, as NumPy's letters: b(ool) i(nt) u(int) f(loat) c(omplex)
        self.factor = factor
        self.mpi_op = mpi_op  # the program's own operation, or one of MPI's without an equivalent here

    @staticmethod
    def PREMUL_SUM(factor: complex) -> ReduceOp:
        """Return the op that sums ``factor * array`` over the ranks."""
        if factor is None:
            raise TypeError(f"ReduceOp.PREMUL_SUM: factor is None; give a number, or use ReduceOp.SUM{on_rank()}")
        return ReduceOp("PREMUL_SUM", "iufc", factor)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" + ("" if self.factor is None else f"({self.factor!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.factor is None:  # copies and pickles of SUM are SUM itself
            return getattr, (ReduceOp, self.name)
        return ReduceOp.PREMUL_SUM, (self.factor,)


_NAMED = {
    name: ReduceOp(name, kinds)
    for name, kinds in {
        "SUM": "biufc",
        "AVG": "fc",
        "PRODUCT": "biufc",
        "MIN": "biuf",
        "MAX": "biuf",
        "BAND": "biu",
        "BOR": "biu",
        "BXOR": "biu",
        "REPRODUCIBLE_SUM": "iufc",
    }.items()
}
for _name, _op in _NAMED.items():
    setattr(ReduceOp, _name, _op)
SUM = ReduceOp.SUM
_ALIASES = {"PROD": "PRODUCT", "MEAN": "AVG", "ADD": "SUM", "MULTIPLY": "PRODUCT", "MINIMUM": "MIN", "MAXIMUM": "MAX"}


def as_reduce_op(operation: str, op: ReduceOpLike) -> ReduceOp:
    """Return the ReduceOp of a name or an ``MPI.Op``."""
    if type(op) is ReduceOp:
        return op
    if isinstance(op, str):
        given = op.strip().upper()
        if _ALIASES.get(given, given) in _NAMED:
            return _NAMED[_ALIASES.get(given, given)]
        raise ValueError(
            f"{operation}: no reduction is called {op!r}; the names are {', '.join(_NAMED).lower()}, "
            f"and ReduceOp.PREMUL_SUM(factor){on_rank()}"
        )
    if type(op).__module__ == "mpi4py.MPI" and type(op).__name__ == "Op":
        return _from_mpi(operation, op)  # type: ignore[arg-type]
    hint, called = "", str(getattr(op, "__name__", "")).upper()
    if type(op).__module__.startswith("torch."):  # torch.distributed.ReduceOp.SUM, or a ReduceOp made from it
        called = str(getattr(getattr(op, "op", op), "name", ""))
        if called in _NAMED:
            return _NAMED[called]
    if called == "PREMUL_SUM":
        hint = ": write ReduceOp.PREMUL_SUM(factor)"
    elif _ALIASES.get(called, called) in _NAMED:  # np.sum, max
        hint = f': write "{_ALIASES.get(called, called).lower()}"'
    # An array may be long; the repr of a function has an address, which differs between ranks.
    shown = f"a {type(op).__name__}" if hasattr(op, "shape") else getattr(op, "__name__", None) or repr(op)
    raise TypeError(f"{operation}: op is {shown}; expected a ReduceOp, its name, or an MPI.Op{hint}{on_rank()}")


def _from_mpi(operation: str, op: MPI.Op) -> ReduceOp:
    """Return hpccomm's equivalent of an MPI op, which also accepts bool, float16 and bfloat16; wrap other MPI ops."""
    from mpi4py import MPI

    for name in ("MAXLOC", "MINLOC"):
        if op == getattr(MPI, name):
            raise TypeError(
                f"{operation}: op is MPI.{name}, which is defined for pairs of a value and an index in datatypes of "
                f"MPI's own (MPI-4.1 §6.9.4); all_gather the values and use np.arg{name[:3].lower()}, or call "
                f"mpi4py{on_rank()}"
            )
    for name in ("SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        if op == getattr(MPI, name):
            return _NAMED[_ALIASES.get(name, name)]
    return ReduceOp("MPI.Op", "biufc", None, op)

"""The page of all operations, from their list: ``python docs/operations_page.py > docs/reference/operations.md``."""

from __future__ import annotations

from pathlib import Path

from hpccomm import Backend
from hpccomm.core.operation_list import OPERATIONS, OperationSpec

PACKAGE = Path(__file__).parent.parent / "hpccomm"
COMMAND = "python docs/operations_page.py > docs/reference/operations.md"
PAGE = """\
# Operations

All operations of a group, in one table. `hpccomm` has a function of each name, or a class (`coalescing`), except
`all_reduce_sparse`, which is `all_reduce` of a sparse matrix. The columns:

* **forms**: *async* takes `async_op=True` and returns a [Work](../concepts/async.md); for `send` and `recv` these are
  `isend` and `irecv`, and `coalescing` has `async_ops=True`. *coalescing*: a [coalescing
  block](../concepts/coalescing.md) collects it; other operations are refused there. *persistent*: there is a
  [persistent form](../concepts/repeated.md), `all_reduce_init` and so on.
* **arguments in a hook**: the names in `operation.arguments` of a [hook](../how-to/hooks.md), which are also the
  arguments of the method of a [backend](../how-to/backends.md), and those in *summary*. Ranks (`root`, `dst`, `src`)
  are ranks of the group. Arguments with a \\* have the same dtype and size on every rank; a dtype, `op` or `root`
  always is the same.
* **not on**: the backends that lack it. Python objects always go over MPI.

{table}

This page is generated from the list in `hpccomm/core/operation_list.py`, and a test compares the two. To make it again:

```console
$ {command}
```"""


def lacking(spec: OperationSpec) -> list[str]:
    """Return the transports whose class does not have the method of an operation."""
    if not hasattr(Backend, spec.name):
        return []
    method = f"    def {spec.name.removesuffix('_coalesced')}("  # a coalesced one is made of the plain one
    return [name for name in ("mpi", "gloo", "nccl") if method not in (PACKAGE / name / "backend.py").read_text()]


def as_markdown() -> str:
    """Return the page."""
    head = "operation", "summary", "forms", "not on", "arguments in a hook"
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for spec in OPERATIONS.values():
        has = {"async": spec.is_asynchronous, "coalescing": spec.is_collected, "persistent": spec.is_persistent}
        arguments = ", ".join(f"`{each}`" + "\\*" * (each in spec.alike) for each in spec.arguments)
        forms = ", ".join(form for form in has if has[form])
        rows.append((f"`{spec.name}`", spec.summary, forms, ", ".join(lacking(spec)), arguments))
    return PAGE.format(table="\n".join(f"| {' | '.join(row)} |" for row in rows), command=COMMAND)


if __name__ == "__main__":
    print(as_markdown())

"""Solve Poisson's equation on a square by conjugate gradients, with the rows of the matrix spread over the ranks.

    mpiexec -n 4 python jobs/conjugate_gradient.py

Each rank owns some rows of the sparse matrix and the same rows of every vector. A product needs the whole search
direction: it is gathered asynchronously, and meanwhile each rank multiplies the columns whose entries it has itself.
Scalar products are all_reduces; the one of the residual overlaps with the update of the solution.

With --reproducible nothing that is computed depends on the number of ranks: scalar products are reproducible ones, and
each row of the matrix is multiplied as a whole. The printed iterates are the same to the last bit, on 1 rank and on 4:

    mpiexec -n 4 python jobs/conjugate_gradient.py --reproducible

The job is right if the residual, computed afresh, is as small as --tolerance asks, and the solution equals that of
SciPy's direct solver as far as this residual and the matrix' condition allow. Exit status: 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.linalg import spsolve

import hpccomm as hc

LARGEST_DIRECT = 500  # grid side up to which the direct solver takes seconds


def poisson_rows(side: int, first: int, last: int) -> csr_array:
    """Return rows first ... last - 1 of the 5-point Laplacian on a grid of side x side unknowns, zero around it."""
    unknown = np.arange(first, last)
    line, place = np.divmod(unknown, side)
    columns_of = [
        (unknown, 4.0, np.ones(unknown.size, bool)),
        (unknown - side, -1.0, line > 0),
        (unknown + side, -1.0, line < side - 1),
        (unknown - 1, -1.0, place > 0),
        (unknown + 1, -1.0, place < side - 1),
    ]
    rows = np.concatenate([unknown[inside] - first for _, _, inside in columns_of])
    columns = np.concatenate([column[inside] for column, _, inside in columns_of])
    values = np.concatenate([np.full(np.count_nonzero(inside), value) for _, value, inside in columns_of])
    return csr_array(coo_array((values, (rows, columns)), shape=(last - first, side * side)))


class RowBlock:
    """This rank's rows of a square matrix, cut into the columns of the ranks before, of this one, and of those after.

    `edges` says where the rows of each rank begin, and where those of the last one end. A `reproducible` product adds
    up each row from left to right, wherever the cuts are.
    """

    def __init__(self, rows: csr_array, edges: list[int], reproducible: bool) -> None:
        self.whole = rows if reproducible else None
        first, last = edges[hc.get_rank()], edges[hc.get_rank() + 1]
        self.before, self.own, self.after = rows[:, :first], rows[:, first:last], rows[:, last:]
        self.vector = np.empty(edges[-1])  # of all ranks, gathered for each product
        self.parts = [self.vector[begin:end] for begin, end in pairwise(edges)]
        self.vector_before, self.vector_after = self.vector[:first], self.vector[last:]

    def __matmul__(self, mine: np.ndarray) -> np.ndarray:
        """Return this rank's part of matrix @ vector, where `mine` is this rank's part of the vector."""
        if self.whole is not None:
            hc.all_gather(self.parts, mine)
            return self.whole @ self.vector  # type: ignore[no-any-return]
        gathering = hc.all_gather(self.parts, mine, async_op=True)
        product: np.ndarray = self.own @ mine  # most of the work, done while the other parts travel
        gathering.wait()
        product += self.before @ self.vector_before
        product += self.after @ self.vector_after
        return product


Dot = Callable[[np.ndarray, np.ndarray], Callable[[], float]]


def plain_dot(x: np.ndarray, y: np.ndarray) -> Callable[[], float]:
    """Begin the scalar product of two vectors that are spread over the ranks; the function returned waits for it."""
    total = np.array([x @ y])
    reducing = hc.all_reduce(total, async_op=True)

    def result() -> float:
        reducing.wait()
        return float(total[0])

    return result


def reproducible_dot(x: np.ndarray, y: np.ndarray) -> Callable[[], float]:
    """Do the same with the same bits on any number of ranks; it is complete already."""
    total = float(hc.reproducible_dot(x, y))
    return lambda: total


def conjugate_gradient(
    matrix: RowBlock, right_side: np.ndarray, dot: Dot, tolerance: float, max_iterations: int, show: bool
) -> tuple[np.ndarray, int]:
    """Return this rank's part of the solution, and the number of iterations."""
    solution = np.zeros_like(right_side)
    residual = right_side.copy()
    direction = residual.copy()
    square = dot(residual, residual)()
    goal = tolerance**2 * square
    iterations = 0
    while square > goal and iterations < max_iterations:
        iterations += 1
        product = matrix @ direction
        step = square / dot(direction, product)()
        residual -= step * product
        squaring = dot(residual, residual)
        solution += step * direction  # the residual's square does not depend on it: the two overlap
        square, before = squaring(), square
        direction *= square / before
        direction += residual
        if show:
            print(f"iteration {iterations}  square of the residual {square!r}")
    return solution, iterations


def gather_vector(mine: np.ndarray, edges: list[int]) -> np.ndarray | None:
    """Return the whole vector on rank 0, None on the others."""
    if hc.get_rank() != 0:
        hc.gather(mine, dst=0)
        return None
    whole = np.empty(edges[-1])
    hc.gather(mine, [whole[begin:end] for begin, end in pairwise(edges)], dst=0)
    return whole


def relative_error(solution: np.ndarray, side: int, right_side: float) -> float:
    """Return how far `solution` is from that of the direct solver, relative to its norm."""
    matrix = poisson_rows(side, 0, side * side).tocsc()
    direct = spsolve(matrix, np.full(side * side, right_side))
    return float(np.linalg.norm(solution - direct) / np.linalg.norm(direct))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--side", type=int, default=200, metavar="N",
        help=f"N x N unknowns (default: 200); compared with the direct solver up to {LARGEST_DIRECT}",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=1e-10, metavar="X", help="residual, relative to the right side's (1e-10)"
    )
    parser.add_argument(
        "--reproducible", action="store_true", help="the same bits on any number of ranks; shows every iterate"
    )
    parser.add_argument("--max-iterations", type=int, metavar="N", help="give up after these (default: 10 N)")
    options = parser.parse_args()
    if options.side < 1:
        parser.error("--side must be 1 or more")
    if options.max_iterations is None:
        options.max_iterations = 10 * options.side
    return options


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    with hc.init_process_group() as world:
        unknowns = options.side**2
        edges = [unknowns * rank // world.size for rank in range(world.size + 1)]
        first, last = edges[world.rank], edges[world.rank + 1]
        matrix = RowBlock(poisson_rows(options.side, first, last), edges, options.reproducible)
        dot = reproducible_dot if options.reproducible else plain_dot
        source = 1 / (options.side + 1) ** 2  # -laplace(u) = 1, times the square of the grid's spacing
        right_side = np.full(last - first, source)

        hc.barrier()
        start = time.perf_counter()
        show = options.reproducible and world.rank == 0
        mine, iterations = conjugate_gradient(matrix, right_side, dot, options.tolerance, options.max_iterations, show)
        seconds = time.perf_counter() - start

        # CG's own residual is a recurrence, which drifts from the true one: compute that, and allow for the drift.
        defect = right_side - matrix @ mine
        residual = (dot(defect, defect)() / dot(right_side, right_side)()) ** 0.5
        small_enough = residual <= 10 * options.tolerance

        error, allowed = 0.0, 0.0
        solution = gather_vector(mine, edges)
        if options.side <= LARGEST_DIRECT:
            condition = 4 * (options.side + 1) ** 2 / np.pi**2  # of the 5-point Laplacian, from above
            allowed = condition * 10 * options.tolerance
            if solution is not None:
                error = relative_error(solution, options.side, source)
            error = hc.all_reduced(error)  # 0 on the other ranks
        right = small_enough and error <= allowed

        if solution is not None:
            if options.reproducible:
                print(f"checksum of the solution: {zlib.crc32(solution.tobytes()):08x}")
            compared = f"off the direct solver by {error:.1e}" if allowed else "too large for the direct solver"
            verdict = "OK" if right else "WRONG: not solved" if not small_enough else "WRONG: not the direct solution"
            print(
                f"{unknowns} unknowns on a {options.side} x {options.side} grid; hottest in the middle: "
                f"{solution.max():.6f}\n"
                f"ranks {world.size}  {iterations} iterations in {seconds:.2f} s  residual {residual:.1e}  "
                f"{compared}  {verdict}",
                flush=True,
            )
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

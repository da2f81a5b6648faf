"""Sort ten million numbers that are spread over the ranks, by sample sort.

    mpiexec -n 4 python jobs/sample_sort.py

Each rank sorts its own numbers and shows a sample of them to all. From all samples together every rank picks the same
splitters, cuts its numbers there, and sends each piece to the rank that it belongs to: all_to_all_single with uneven
splits. Afterwards rank 0 has the smallest numbers, the last rank the largest, and each has them in order.

The job is right if the ranks' parts, one after the other, equal np.sort of all numbers. Exit status: 0 if they do, 1
if not.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import hpccomm as hc

SAMPLES_PER_SPLITTER = 64  # more make the parts more even, and the gathered sample longer


def draw_numbers(size: int, rank: int, ranks: int, seed: int) -> np.ndarray:
    """Return the numbers that `rank` starts with: its share of `size`, from a random stream of its own."""
    share = size * (rank + 1) // ranks - size * rank // ranks
    return np.random.default_rng([seed, rank]).standard_normal(share)


def choose_splitters(ordered: np.ndarray) -> np.ndarray:
    """Return the numbers at which to cut, one less than there are ranks, and the same on every rank."""
    ranks = hc.get_world_size()
    places = np.linspace(0, max(ordered.size - 1, 0), SAMPLES_PER_SPLITTER * ranks).astype(int)
    sample = ordered[places] if ordered.size else np.full(places.size, np.inf)  # a rank without numbers
    samples = np.empty(ranks * sample.size)
    hc.all_gather_single(samples, sample)
    samples.sort()
    return samples[sample.size :: sample.size]


def sample_sort(numbers: np.ndarray) -> np.ndarray:
    """Return this rank's part of all ranks' numbers in order: none is larger than any of the next rank."""
    ordered = np.sort(numbers)
    cuts = np.searchsorted(ordered, choose_splitters(ordered), side="right")
    to_send = np.diff(cuts, prepend=0, append=ordered.size)
    to_receive = np.empty_like(to_send)
    hc.all_to_all_single(to_receive, to_send)  # how many come from each rank
    part = np.empty(to_receive.sum(), dtype=ordered.dtype)
    hc.all_to_all_single(part, ordered, output_split_sizes=to_receive, input_split_sizes=to_send)
    part.sort(kind="stable")  # a stable sort finds the ranks' ordered runs and merges them: several times faster
    return part


def gather_parts(part: np.ndarray) -> list[np.ndarray] | None:
    """Return the parts of all ranks on rank 0, None on the others."""
    sizes = np.empty(hc.get_world_size(), dtype=np.int64)
    hc.all_gather_single(sizes, np.array([part.size]))
    parts = [np.empty(size, dtype=part.dtype) for size in sizes] if hc.get_rank() == 0 else None
    hc.gather(part, parts, dst=0)
    return parts


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", type=int, default=10_000_000, metavar="N", help="numbers, all ranks together (default: 10000000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: 0)")
    options = parser.parse_args()
    if options.size < 0:
        parser.error("--size must be 0 or more")
    return options


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    with hc.init_process_group() as world:
        numbers = draw_numbers(options.size, world.rank, world.size, options.seed)
        hc.barrier()
        start = time.perf_counter()
        part = sample_sort(numbers)
        hc.barrier()
        seconds = time.perf_counter() - start

        parts = gather_parts(part)
        right = True
        if parts is not None:
            # The expected answer is made from the random streams alone: nothing in it has been communicated.
            everything = [draw_numbers(options.size, rank, world.size, options.seed) for rank in range(world.size)]
            right = np.array_equal(np.concatenate(parts), np.sort(np.concatenate(everything)))
            largest = max(each.size for each in parts) * world.size / max(options.size, 1)
            print(
                f"{options.size} numbers in {seconds:.2f} s, {options.size / seconds / 1e6:.1f} million per second; "
                f"the largest part is {largest:.3f} of an even one\n"
                f"ranks {world.size}  {'equals np.sort  OK' if right else 'WRONG: differs from np.sort'}",
                flush=True,
            )
        return 0 if hc.agree(right) else 1


if __name__ == "__main__":
    sys.exit(main())

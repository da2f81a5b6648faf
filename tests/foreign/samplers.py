"""The first examples of emcee and dynesty, with a pool of ranks, give the same as without one.

python -m tests.foreign.samplers BIN [RANKS...]: in the virtual environment of `make test-foreign`. Without arguments it
is the program of each rank.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..launch import ROOT

WIDTHS = np.random.default_rng(1).random(5)
COVARIANCE = np.where(np.eye(3) == 1, 1.0, 0.95)
INVERSE = np.linalg.inv(COVARIANCE)


def log_probability(x: np.ndarray, inverse_widths: np.ndarray) -> float:
    """Of emcee's README: a Gaussian."""
    return float(-0.5 * np.sum(inverse_widths * x**2))


def log_likelihood(x: np.ndarray) -> float:
    """Return the logarithm of a Gaussian whose parameters are correlated (dynesty's README)."""
    return float(-0.5 * np.dot(x, np.dot(INVERSE, x)))


def prior(u: np.ndarray) -> np.ndarray:
    """Return parameters between -10 and 10, for numbers between 0 and 1."""
    return 10.0 * (2.0 * u - 1.0)


def chain(pool: Any) -> np.ndarray:
    """Return emcee's samples."""
    import emcee

    np.random.seed(42)  # noqa: NPY002  # of which emcee takes its state
    start = np.random.default_rng(1).standard_normal((32, 5))
    sampler = emcee.EnsembleSampler(32, 5, log_probability, args=[1.0 / WIDTHS], pool=pool)
    sampler.run_mcmc(start, 100)
    return np.asarray(sampler.get_chain())


def samples(pool: Any, queue_size: int | None) -> np.ndarray:
    """Return dynesty's samples, which depend on the size of its queue."""
    import dynesty

    random = np.random.default_rng(5)
    sampler = dynesty.NestedSampler(
        log_likelihood, prior, 3, nlive=100, rstate=random, pool=pool, queue_size=queue_size
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is stopped early
        sampler.run_nested(print_progress=False, maxiter=400)
    return np.asarray(sampler.results.samples)


def program() -> None:
    """Sample with the pool and without one, and compare on rank 0."""
    import hpccomm as hc

    hc.init_process_group()
    with hc.executor() as executor:
        if executor is not None:
            size = executor.num_workers
            found = chain(executor), samples(executor, size)
            with ThreadPoolExecutor(size) as threads:
                expected = chain(None), samples(threads, size)
            for name, actual, right in zip(("emcee", "dynesty"), found, expected, strict=True):
                print(f"{name}: {actual.shape}, {'equal' if np.array_equal(actual, right) else 'WRONG'}")
    hc.destroy_process_group()


def main() -> None:
    """Start the program, and print a line for each number of ranks; status 1 where one fails."""
    from .suite import Job

    job = Job(Path(sys.argv[1]).absolute(), ROOT / "build" / "foreign")
    fails = False
    for ranks in map(int, sys.argv[2:] or ("1", "3", "4")):
        with tempfile.TemporaryDirectory() as folder:
            ended = job.run(ranks, "-m", "tests.foreign.samplers", watched=False, folder=folder)
        is_right = ended.returncode == 0 and ended.stdout.count("equal") == 2
        print("ok   " if is_right else "WRONG", f"on {ranks} ranks:", *ended.stdout.splitlines(), flush=True)
        if not is_right:
            print(ended.stdout, ended.stderr, file=sys.stderr)
        fails |= not is_right
    sys.exit(fails)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        program()

"""Train on handwritten digits although ranks die: the others go back to the last checkpoint, and go on.

    mpirun --with-ft ulfm -n 4 python jobs/elastic_training.py
    mpirun --with-ft ulfm -n 4 python jobs/elastic_training.py --kill 1@100 --kill 3@250
    mpirun --with-ft ulfm -n 6 python jobs/elastic_training.py --spares 2

By default two ranks kill themselves (SIGKILL) at random steps. The others are told of it by RankFailedError. With
--spares some ranks wait until they are needed: they take the places of the dead, so the number of ranks stays the same.
Without, or when all spares are used up, the survivors make a group of those that are left. Then all load the last
checkpoint, share each batch among themselves, and go on. Spares and killing take Open MPI and --with-ft ulfm; with
--kill none it runs on any MPI.

The weights do not depend on the number of ranks, up to rounding; with enough spares they have the bits of an
undisturbed run, as their digest in the last line shows. The job is right if as many ranks are left as should be, they
hold bitwise the same weights, and the network reads more than 95 % of the images it has never seen. Then its first rank
writes a file, DONE, into the folder of the checkpoints: the exit status of mpirun is not enough, for it is that of the
ranks that died, or 0 although a node was lost.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import hpccomm as hc

PIXELS, CLASSES = 64, 10
TEST_IMAGES = 360  # a fifth
MARKER = "DONE"


def gradient(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the gradient of the loss (cross entropy) of softmax regression, summed over these images."""
    scores = images @ weights
    scores -= scores.max(axis=1, keepdims=True)
    error = np.exp(scores)
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    summed: np.ndarray = images.T @ error
    return summed


class Training:
    """The weights, their velocities, and the step that they are of."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, options: argparse.Namespace) -> None:
        self.images, self.labels, self.options = images, labels, options
        self.weights = np.zeros((images.shape[1], CLASSES))
        self.velocity = np.zeros_like(self.weights)
        self.step = 0

    def advance(self) -> None:
        """Do one step of gradient descent with momentum, all ranks together."""
        # The batch is a function of the step: after going back, and on fewer ranks, the same images come again.
        batch = np.random.default_rng([self.options.seed, self.step]).choice(len(self.images), self.options.batch)
        mine = np.array_split(batch, hc.get_world_size())[hc.get_rank()]
        total = gradient(self.weights, self.images[mine], self.labels[mine])
        hc.all_reduce(total, "reproducible_sum")  # the same bits on whichever nodes the ranks are
        self.velocity = 0.9 * self.velocity - self.options.learning_rate / len(batch) * total
        self.weights += self.velocity
        self.step += 1

    def save(self) -> None:
        """Write a checkpoint."""
        arrays = {"weights": self.weights, "velocity": self.velocity}
        hc.checkpoint.save(self.options.folder, {}, self.step, replicated=arrays, overwrite=True)

    def go_back(self) -> None:
        """Read the last checkpoint, whichever ranks have written it; begin anew if there is none."""
        try:
            found = hc.checkpoint.load(self.options.folder)
        except hc.checkpoint.NoCheckpointError:
            self.weights[:], self.velocity[:], self.step = 0, 0, 0
        else:
            self.weights, self.velocity = found.replicated["weights"], found.replicated["velocity"]
            self.step = found.step


def train(training: Training, deaths: dict[int, int], me: int) -> None:
    """Train to the end; `me`, this rank at the start, dies at its step in `deaths`."""
    options = training.options
    while training.step < options.steps:
        if deaths.get(me) == training.step:
            os.kill(os.getpid(), signal.SIGKILL)
        training.advance()
        if training.step % options.every == 0:
            training.save()


def go_on() -> None:
    """Make the world whole again with spares, or else of the ranks that are left; another one may die meanwhile."""
    while True:
        try:
            try:
                hc.replace_failed()
            except hc.TooFewSparesError:
                hc.shrink_group()
        except hc.RankFailedError:
            continue
        return


def meet(training: Training, is_new: bool) -> str:
    """Tell the ranks that are new which folder the checkpoints are in; return in words what has happened."""
    said: list[Any] = [None] * hc.get_world_size()
    hc.all_gather_object(said, None if is_new else (training.options.folder, training.step))
    training.options.folder, stopped_at = next(each for each in said if each is not None)
    new = [rank for rank, each in enumerate(said) if each is None]
    return f"step {stopped_at}: " + (f"ranks {new} are new" if new else f"{len(said)} ranks are left")


def is_right(training: Training, images: np.ndarray, labels: np.ndarray, expected_ranks: int) -> tuple[bool, float]:
    """Return whether the answer is right, on every rank alike, and how many of the images are read, in percent."""
    accuracy = 100 * float(((images @ training.weights).argmax(axis=1) == labels).mean())
    of_rank_0 = training.weights.copy()
    hc.broadcast(of_rank_0, src=0)
    mine = bool((of_rank_0 == training.weights).all()) and accuracy > training.options.require_accuracy
    return hc.agree(mine and hc.get_world_size() == expected_ranks), accuracy


def choose_deaths(options: argparse.Namespace, ranks: int) -> dict[int, int]:
    """Return the step at which each rank that is to die does so; the same on every rank."""
    if options.kill == ["none"]:
        return {}
    if options.kill:
        return {int(rank): int(step) for rank, _, step in (each.partition("@") for each in options.kill)}
    rng = np.random.default_rng(options.seed)
    victims = rng.choice(ranks, min(2, ranks - 1), replace=False)
    return {int(rank): int(rng.integers(1, options.steps)) for rank in victims}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="steps of training (600)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images per step, all ranks together (128)")
    parser.add_argument("--every", type=int, default=25, metavar="N", help="steps between two checkpoints (25)")
    parser.add_argument("--learning-rate", type=float, default=0.5, metavar="X", help="step length (0.5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the batches and the deaths (0)")
    parser.add_argument(
        "--kill", action="append", default=[], metavar="RANK@STEP", help="who dies when, or none (two at random)"
    )
    parser.add_argument("--spares", type=int, default=0, metavar="N", help="ranks that wait until others die (0)")
    parser.add_argument("--folder", type=Path, help="of the checkpoints (a new one, removed at the end)")
    parser.add_argument("--require-accuracy", type=float, default=95, metavar="%", help="fail if not above this (95)")
    return parser.parse_args()


def main() -> int:
    """Run the job and return its exit status, the same on every rank that is left."""
    options = parse_arguments()
    world = hc.init_process_group(spares=options.spares)
    with world, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        me = world.rank
        options.folder = options.folder or Path(own)
        images, labels = load_digits(return_X_y=True)
        images = np.column_stack([images / 16, np.ones(len(images))])
        order = np.random.default_rng(0).permutation(len(images))  # the same test, whatever the seed
        train_set, test_set = np.split(order, [-TEST_IMAGES])
        training = Training(images[train_set], labels[train_set], options)
        deaths = choose_deaths(options, world.size)
        expected_ranks = world.size - max(0, len(deaths) - options.spares)
        if world.is_replacement:
            deaths = {}  # the one that had its rank before has died
        is_new = has_failed = world.is_replacement
        while True:
            try:
                news = meet(training, is_new)
                is_new = False
                if has_failed:
                    training.go_back()
                    if hc.get_rank() == 0:
                        print(f"{news}; back to step {training.step}", flush=True)
                elif me == 0:
                    (options.folder / MARKER).unlink(missing_ok=True)
                train(training, deaths, me)
                right, accuracy = is_right(training, images[test_set], labels[test_set], expected_ranks)
                break
            except hc.RankFailedError:
                go_on()
                has_failed = True
        if hc.get_rank() == 0:
            if right:
                (options.folder / MARKER).write_text(f"step {training.step}, accuracy {accuracy}\n")
            digest = hashlib.sha256(training.weights.tobytes()).hexdigest()[:16]
            verdict = "OK" if right else "WRONG"
            print(
                f"ranks {hc.get_world_size()}  test accuracy {accuracy:.1f} %  weights {digest}  {verdict}", flush=True
            )
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

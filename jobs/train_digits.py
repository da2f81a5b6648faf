"""Train a small network on 1797 real handwritten digits, data-parallel: every batch is shared by the ranks.

    mpiexec -n 4 python jobs/train_digits.py
    mpiexec -n 4 python jobs/train_digits.py --device cuda  # on GPUs, one for each rank
    mpiexec -n 4 python jobs/train_digits.py --checkpoint DIR  # may be stopped, and started again

Every rank has all the weights, computes the gradient of its part of each batch, and adds it up with the others' in
buckets: the all_reduce of a bucket runs while the gradients of the layers before it are computed. One seed fixes the
weights at the start and the order of the images, whatever the number of ranks: the final weights are the same on 1, 2
or 4 ranks, up to rounding. On GPUs the same code works on CuPy arrays, which NCCL reduces.

The job is right if the network reads more than 95 % of the images it has never seen, and all ranks hold bitwise the
same weights. Exit status: 0 if it is, 1 if not.

With --checkpoint, SIGTERM or SIGUSR1 to any rank, as a batch system sends them when the time is over, makes all ranks
save at the end of the step and leave with exit status 75. The same command goes on from there, and so does one after a
crash, from the last of the checkpoints that are written every few epochs. On as many ranks as before the answer is
bitwise that of a run that nobody has stopped.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from itertools import accumulate
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

import hpccomm as hc

PIXELS, CLASSES = 64, 10
TEST_IMAGES = 360  # a fifth
BUCKET_BYTES = 16 << 10  # small, like the network: the hidden layer has a bucket of its own
STOPPED = 75  # the exit status of "try again later" (EX_TEMPFAIL in sysexits.h)


class Network:
    """A perceptron of 64 pixels, one hidden layer and 10 digits.

    The weights and biases of both layers are views of one flat vector; their gradients are views of the buckets that
    are reduced.
    """

    def __init__(self, hidden: int, rng: np.random.Generator, xp: ModuleType) -> None:
        self.xp = xp  # NumPy or CuPy
        shapes = [(PIXELS, hidden), (hidden,), (hidden, CLASSES), (CLASSES,)]
        self.weights = xp.zeros(sum(map(prod, shapes)))
        self.layers = views(self.weights, shapes)
        # SUM, to be divided by the whole batch. AVG would weigh the ranks, not the images: wrong for uneven shares.
        self.gradients = hc.GradientBuckets(self.layers, bucket_bytes=BUCKET_BYTES, op="sum")
        for layer in self.layers[::2]:  # He's initialisation; the biases stay 0
            layer[:] = xp.asarray(rng.normal(0, np.sqrt(2 / len(layer)), layer.shape))

    def forward(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what the hidden layer makes of the images, and the score of each digit."""
        weights_1, bias_1, weights_2, bias_2 = self.layers
        hidden = self.xp.maximum(images @ weights_1 + bias_1, 0)
        return hidden, hidden @ weights_2 + bias_2

    def backward(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Compute the gradients of the loss (cross entropy) summed over all ranks' images; return this rank's loss."""
        hidden, scores = self.forward(images)
        scores -= scores.max(axis=1, keepdims=True)
        probabilities = self.xp.exp(scores)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        of_label = self.xp.arange(len(labels)), labels
        loss = -self.xp.log(probabilities[of_label]).sum()

        error = probabilities
        error[of_label] -= 1
        self.reduce(3, error.sum(axis=0))
        self.reduce(2, hidden.T @ error)
        error = error @ self.layers[2].T * (hidden > 0)
        self.reduce(1, error.sum(axis=0))
        self.reduce(0, images.T @ error)
        self.gradients.wait()
        return float(loss)

    def reduce(self, layer: int, gradient: np.ndarray) -> None:
        """Hand in the gradient of a layer: its bucket leaves when it is full."""
        self.gradients.arrays[layer][:] = gradient
        self.gradients.ready(layer)

    def count_right(self, images: np.ndarray, labels: np.ndarray) -> int:
        """Return how many images get the highest score for the right digit."""
        return int((self.forward(images)[1].argmax(axis=1) == labels).sum())


def views(vector: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Return consecutive parts of `vector`, seen as arrays of these shapes."""
    ends = accumulate(prod(shape) for shape in shapes)
    return [vector[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes)]


def share(items: np.ndarray) -> np.ndarray:
    """Return this rank's part of `items`: an equal one, or one less, or none if there are more ranks than items."""
    return np.array_split(items, hc.get_world_size())[hc.get_rank()]


class Notice:
    """Whether a signal has told this process that its time is over."""

    def __init__(self) -> None:
        self.given = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._take)

    def _take(self, *_: object) -> None:
        self.given = True

    def given_to_any_rank(self) -> bool:
        """Return whether any rank has been told: all ranks get the same answer, and stop after the same step."""
        return hc.all_reduced(self.given) > 0


class Training:
    """Stochastic gradient descent with momentum, and how far it has come."""

    def __init__(self, network: Network, options: argparse.Namespace) -> None:
        self.network, self.options = network, options
        self.velocity = network.xp.zeros_like(network.weights)
        self.velocities = views(self.velocity, [layer.shape for layer in network.layers])
        self.step = 0
        self.loss = 0.0  # of this rank's images, in this epoch

    def run(self, images: np.ndarray, labels: np.ndarray, rng: np.random.Generator, notice: Notice | None) -> bool:
        """Train to the last epoch, or to the step in which `notice` is given; return whether it was the last."""
        options = self.options
        starts = range(0, len(images), options.batch)
        done = self.step // len(starts)
        for _ in range(done):  # before the checkpoint: the orders are drawn again, one after the other
            rng.permutation(len(images))
        # Rank 0 alone shows progress, on stderr: the answer on stdout stays clean.
        quiet = options.quiet or hc.get_rank() > 0
        epochs = tqdm(range(done, options.epochs), "training", unit=" epochs", ncols=80, disable=quiet)
        for epoch in epochs:
            order = rng.permutation(len(images))  # the same on every rank: they share the seed
            for start in starts[self.step % len(starts) :]:
                if start == 0:
                    self.loss = 0.0
                self.learn(images, labels, order[start : start + options.batch])
                if notice and notice.given_to_any_rank():
                    self.save()
                    return False
            epochs.set_postfix(loss=f"{hc.all_reduced(self.loss) / len(images):.4f}", refresh=False)
            if notice and (epoch + 1 == options.epochs or (epoch + 1) % options.every == 0):
                self.save()
        return True

    def learn(self, images: np.ndarray, labels: np.ndarray, batch: np.ndarray) -> None:
        """Do one step, all ranks together."""
        if hc.get_rank() == self.options.straggler:
            time.sleep(1e-3)
        network = self.network
        mine = network.xp.asarray(share(batch))
        self.loss += network.backward(images[mine], labels[mine])
        for layer, velocity, gradient in zip(network.layers, self.velocities, network.gradients.arrays):
            velocity *= self.options.momentum
            velocity -= self.options.learning_rate / len(batch) * gradient
            layer += velocity
        self.step += 1

    def settings(self) -> dict[str, float]:
        """Return what has to be the same when a training goes on."""
        return {name: getattr(self.options, name) for name in ("batch", "hidden", "learning_rate", "momentum", "seed")}

    def save(self) -> None:
        """Write a checkpoint, all ranks together."""
        same = {"weights": self.network.weights, "velocity": self.velocity}
        own = {"loss": np.array([self.loss])}
        hc.checkpoint.save(self.options.checkpoint, own, self.step, replicated=same, metadata=self.settings())

    def load(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        try:
            found = hc.checkpoint.load(self.options.checkpoint)
        except hc.checkpoint.NoCheckpointError:
            return
        if found.metadata != self.settings():
            raise SystemExit(f"{self.options.checkpoint} is of a training with {found.metadata}; take another folder")
        self.network.weights[:] = self.network.xp.asarray(found.replicated["weights"])
        self.velocity[:] = self.network.xp.asarray(found.replicated["velocity"])
        self.step, self.loss = found.step, float(found.arrays["loss"].sum())


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and their labels. Rank 0 reads them: to import scikit-learn takes seconds."""
    found: list[Any] = [None]
    if hc.get_rank() == 0:
        from sklearn.datasets import load_digits

        found = [load_digits(return_X_y=True)]
    hc.broadcast_object_list(found, src=0)
    images, labels = found[0]
    return images, labels


def same_everywhere(array: np.ndarray) -> bool:
    """Return whether `array` is bitwise the same on all ranks; every rank gets the same answer."""
    of_rank_0 = array.copy()
    hc.broadcast(of_rank_0, src=0)
    return hc.all_reduced(not (array == of_rank_0).all()) == 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, metavar="N", help="passes over the images (default: 30)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images per step, all ranks together (64)")
    parser.add_argument("--hidden", type=int, default=64, metavar="N", help="neurons in the hidden layer (64)")
    parser.add_argument("--learning-rate", type=float, default=0.05, metavar="X", help="step length (0.05)")
    parser.add_argument("--momentum", type=float, default=0.9, metavar="X", help="what a step keeps of the last (0.9)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the first weights and the order of the images (0)"
    )
    parser.add_argument("--save-weights", type=Path, metavar="FILE.npz", help="write the final weights")
    parser.add_argument("--require-accuracy", type=float, default=95, metavar="%", help="fail if not above this (95)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save there, and go on from there")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="epochs between two checkpoints (10)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the arrays are (cpu)")
    parser.add_argument("--straggler", type=int, metavar="RANK", help="be 1 ms late in every step, on this rank")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args()
    for name in ("epochs", "batch", "hidden", "every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return options


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    on_gpus = options.device == "cuda"
    xp = importlib.import_module("cupy" if on_gpus else "numpy")
    notice = Notice() if options.checkpoint else None
    with hc.init_process_group(device_id="auto" if on_gpus else None) as world:
        rng = np.random.default_rng(options.seed)
        images, labels = map(xp.asarray, digits())
        images /= 16  # grey levels are 0 to 16
        train_set, test_set = np.split(rng.permutation(len(images)), [-TEST_IMAGES])
        network = Network(options.hidden, rng, xp)
        if world.rank == 0:
            print(
                f"{len(images)} handwritten digits: {len(train_set)} to learn from, {TEST_IMAGES} to be tested on\n"
                f"network {PIXELS}-{options.hidden}-{CLASSES}, {network.weights.size} weights; "
                f"batches of {options.batch} on {world.size} rank{'s' * (world.size > 1)}",
                flush=True,
            )

        training = Training(network, options)
        if options.checkpoint:
            training.load()
            if world.rank == 0 and training.step:
                print(f"going on after step {training.step}", flush=True)
        if not training.run(images[train_set], labels[train_set], rng, notice):
            if world.rank == 0:
                print(f"stopped by a signal after step {training.step}, saved in {options.checkpoint}", flush=True)
            return STOPPED
        loss = hc.all_reduced(training.loss) / len(train_set)
        my_test = xp.asarray(share(test_set))
        accuracy = 100 * hc.all_reduced(network.count_right(images[my_test], labels[my_test])) / TEST_IMAGES
        agree = same_everywhere(network.weights)
        right = agree and accuracy > options.require_accuracy

        if world.rank == 0:
            if options.save_weights:
                np.savez(options.save_weights, weights=network.weights.get() if on_gpus else network.weights)
            verdict = "OK" if right else "WRONG: too few" if agree else "WRONG: the ranks' weights differ"
            print(f"ranks {world.size}  loss {loss:.4f}  test accuracy {accuracy:.1f} %  {verdict}", flush=True)
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

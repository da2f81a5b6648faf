"""Train the network of train_digits.py in PyTorch, by DistributedDataParallel over MPI.

    mpiexec -n 4 python jobs/torch_ddp.py
    mpiexec -n 4 python jobs/torch_ddp.py --backend gloo
    mpiexec -n 2 python jobs/torch_ddp.py --backend hpccomm gloo  # in turns, step by step: which one is faster

One line makes a PyTorch script one for mpiexec and srun: hpccomm.torch.init_process_group(). Rank, number of ranks and
the place to meet at are MPI's, whatever the backend. The first weights, the order of the images and the steps are those
of train_digits.py, and so are the final weights, up to rounding.

The job is right if the network reads more than 95 % of the images it has never seen, as many with one backend as with
the other, and all ranks hold bitwise the same weights. Exit status: 0 if it is, 1 if not.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hpccomm.torch

PIXELS, CLASSES = 64, 10
TEST_IMAGES = 360  # a fifth


def network(hidden: int, rng: np.random.Generator) -> nn.Module:
    """Return a perceptron of 64 pixels, one hidden layer and 10 digits."""
    layers = nn.Linear(PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    for layer in layers[::2]:  # He's initialisation
        weights = rng.normal(0, np.sqrt(2 / layer.in_features), (layer.in_features, layer.out_features))
        layer.weight.data = torch.from_numpy(weights.T.copy())
        layer.bias.data = torch.zeros(layer.out_features, dtype=torch.float64)
    return nn.Sequential(*layers)


class Training:
    """Stochastic gradient descent with momentum, over one backend."""

    def __init__(self, backend: str, model: nn.Module, options: argparse.Namespace) -> None:
        self.backend = backend
        self.model = DistributedDataParallel(copy.deepcopy(model), process_group=dist.new_group(backend=backend))
        self.optimizer = torch.optim.SGD(self.model.parameters(), options.learning_rate, options.momentum)
        self.seconds: list[float] = []  # of each step

    def learn(self, images: Tensor, labels: Tensor, batch: np.ndarray) -> None:
        """Do one step, all ranks together."""
        mine = np.array_split(batch, dist.get_world_size())[dist.get_rank()]  # may be one less than others', or none
        dist.barrier()  # the time of this step, not of what a rank was late before
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images[mine]), labels[mine], reduction="sum")
        # The mean over the images of all ranks. DDP takes the mean over the ranks, whose shares may be uneven.
        (loss * dist.get_world_size() / len(batch)).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)

    def step_seconds(self) -> float:
        """Return the median of the times of a step, on the slowest rank."""
        median = torch.tensor(np.median(self.seconds))
        dist.all_reduce(median, dist.ReduceOp.MAX)
        return float(median)

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return how many of the images get the highest score for the right digit, in percent."""
        with torch.no_grad():
            return 100 * float((self.model.module(images).argmax(1) == labels).double().mean())

    def weights(self) -> Tensor:
        """Return all weights and biases in one vector, each layer's as (inputs, outputs)."""
        return torch.cat([parameter.detach().t().flatten() for parameter in self.model.parameters()])


def same_everywhere(tensor: Tensor) -> bool:
    """Return whether `tensor` is bitwise the same on all ranks; every rank gets the same answer."""
    of_rank_0 = tensor.clone()
    dist.broadcast(of_rank_0, 0)
    differing = torch.tensor(float(not torch.equal(of_rank_0, tensor)))
    dist.all_reduce(differing)
    return float(differing) == 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["hpccomm"], metavar="NAME", help="hpccomm, gloo, or both")
    parser.add_argument("--epochs", type=int, default=30, metavar="N", help="passes over the images (default: 30)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images per step, all ranks together (64)")
    parser.add_argument("--hidden", type=int, default=64, metavar="N", help="neurons in the hidden layer (64)")
    parser.add_argument("--learning-rate", type=float, default=0.05, metavar="X", help="step length (0.05)")
    parser.add_argument("--momentum", type=float, default=0.9, metavar="X", help="what a step keeps of the last (0.9)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and the order of images (0)")
    parser.add_argument("--save-weights", type=Path, metavar="FILE.npz", help="write the final weights")
    parser.add_argument("--require-accuracy", type=float, default=95, metavar="%", help="fail if not above this (95)")
    options = parser.parse_args()
    for name in ("epochs", "batch", "hidden"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return options


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    torch.set_num_threads(1)  # ranks share the cores, and the layers are small
    hpccomm.torch.init_process_group(options.backend[0])

    rng = np.random.default_rng(options.seed)
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images /= 16  # grey levels are 0 to 16
    train_set, test_set = np.split(rng.permutation(len(images)), [-TEST_IMAGES])
    model = network(options.hidden, rng)
    trainings = [Training(backend, model, options) for backend in options.backend]
    for _ in range(options.epochs):
        order = train_set[rng.permutation(len(train_set))]
        for start in range(0, len(order), options.batch):
            for training in trainings:
                training.learn(images, labels, order[start : start + options.batch])
            trainings.reverse()  # neither is always the first
    trainings.sort(key=lambda training: options.backend.index(training.backend))

    times = [training.step_seconds() for training in trainings]
    accuracies = [training.accuracy(images[test_set], labels[test_set]) for training in trainings]
    right = (
        all(same_everywhere(training.weights()) for training in trainings)
        and min(accuracies) > options.require_accuracy
        and len(set(accuracies)) == 1
    )
    if dist.get_rank() == 0:
        for training, seconds, accuracy in zip(trainings, times, accuracies):
            compared = "" if training is trainings[0] else f" ({seconds / times[0]:.2f} times {options.backend[0]}'s)"
            print(f"{training.backend}: {1e6 * seconds:.0f} us per step{compared}, test accuracy {accuracy:.1f} %")
        if options.save_weights:
            np.savez(options.save_weights, weights=trainings[0].weights().numpy())
        print(f"ranks {dist.get_world_size()}  {'OK' if right else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

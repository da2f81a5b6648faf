"""Teach a small transformer to write on like this repository's documentation: PyTorch's FSDP2 over MPI.

    mpiexec -n 4 python jobs/torch_fsdp.py
    mpiexec -n 3 python jobs/torch_fsdp.py --steps 100 --save DIR  # and on another number of ranks, from there on:
    mpiexec -n 2 python jobs/torch_fsdp.py --steps 200 --load DIR

Every rank holds a part of each weight, of its gradient and of the optimizer's state (fully_shard); the whole weights of
a layer are together only while it is at work. Each batch is shared by the ranks. torch.distributed.checkpoint writes
the parts to a folder, from which any number of ranks can read theirs.

The job is right if the loss, on a text that is never learned from, is as low as --require-loss says, and if it is
after loading what it was when the checkpoint was written. Exit status: 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import hpccomm.torch

DOCS = Path(__file__).resolve().parent.parent / "docs"
BYTES = 256  # the vocabulary
LENGTH = 64  # bytes in a piece of text
TEST_PIECES = 64
STEP_LENGTH = 3e-3


class Transformer(nn.Module):
    """Predicts the next byte at each place of a text, from those before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(LENGTH, width)
        options: Any = {"dropout": 0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers))
        self.out = nn.Linear(width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of each byte, at each place of each piece: (pieces x LENGTH, BYTES)."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        found = self.bytes(text) + self.places.weight
        for layer in self.layers:
            found = layer(found, src_mask=mask, is_causal=True)
        return self.out(found.flatten(0, 1))


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """Return the loss (cross entropy) of a byte, summed over some pieces of text."""
    return cross_entropy(model(pieces[:, :-1]), pieces[:, 1:].flatten(), reduction="sum") / LENGTH


def read(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Return the text to learn from, and pieces of its last tenth to be tested on."""
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    learned, tested = text.tensor_split([len(text) * 9 // 10])
    return learned, random_pieces(tested, TEST_PIECES, seed=0)


def random_pieces(text: Tensor, count: int, seed: int) -> Tensor:
    """Return some pieces of the text, the same on every rank: (count, LENGTH + 1)."""
    starts = torch.randint(len(text) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(LENGTH + 1)]


def share(pieces: Tensor) -> Tensor:
    """Return this rank's part: an equal one, or one less."""
    return pieces.tensor_split(dist.get_world_size())[dist.get_rank()]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, pieces: Tensor) -> None:
    """Do one step, all ranks together."""
    optimizer.zero_grad()
    # The mean over the pieces of all ranks. FSDP takes the mean over the ranks, whose shares may be uneven.
    (loss_of(model, share(pieces)) * dist.get_world_size() / len(pieces)).backward()
    optimizer.step()


def test_loss(model: nn.Module, pieces: Tensor) -> float:
    """Return the mean of the loss of all pieces; every rank gets the same answer."""
    with torch.no_grad():
        loss = loss_of(model, share(pieces)) / len(pieces)
    dist.all_reduce(loss)
    return float(loss)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write a checkpoint, all ranks together."""
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state, **progress}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read this rank's parts of a checkpoint, and return how far it was."""
    weights, state = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0, "loss": 0.0}
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return {name: found[name] for name in ("step", "loss")}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="what to learn (default: docs/*.md)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="from the very beginning (default: 200)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="pieces of text per step, all ranks (32)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of the layers, a multiple of 4 (64)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of the transformer (2)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument("--load", type=Path, metavar="DIR", help="go on from a checkpoint")
    parser.add_argument("--require-loss", type=float, default=2.8, metavar="X", help="fail if not below this (2.8)")
    return parser.parse_args()


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    torch.set_num_threads(1)  # ranks share the cores
    hpccomm.torch.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not ranks <= min(options.batch, TEST_PIECES):
        raise SystemExit(f"--batch {options.batch}, {TEST_PIECES} pieces to be tested on: not one for each rank")

    learned, tested = read(options.text or sorted(DOCS.glob("*.md")))
    torch.manual_seed(0)  # the same first weights everywhere
    model = Transformer(options.width, options.layers)
    size = sum(map(Tensor.numel, model.parameters()))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=STEP_LENGTH)

    first, right = 0, True
    if options.load:
        progress = load(options.load, model, optimizer)
        first, loss = progress["step"], test_loss(model, tested)
        right = abs(loss - progress["loss"]) < 1e-3
        if rank == 0:
            print(f"loaded after step {first}: loss {loss:.4f}, {progress['loss']:.4f} when it was saved", flush=True)
    elif rank == 0:
        mine = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"{len(learned)} bytes to learn from; {size} weights, of which rank 0 holds {mine}", flush=True)
    for step in range(first, options.steps):
        learn(model, optimizer, random_pieces(learned, options.batch, seed=step + 1))
    loss = test_loss(model, tested)
    right = right and loss < options.require_loss
    if options.save:
        save(options.save, model, optimizer, {"step": options.steps, "loss": loss})
    if rank == 0:
        print(f"ranks {ranks}  step {options.steps}  loss {loss:.4f}  {'OK' if right else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

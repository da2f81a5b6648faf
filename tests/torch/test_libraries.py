"""Libraries on top of torch.distributed, as their users call them: the outcome that gloo gives. Nothing is fetched."""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..launch import launch

pytestmark = pytest.mark.serial

PROGRAMS = {
    "transformers": """
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        small = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
        small |= {"bos_token_id": 1, "eos_token_id": 2}
        model = GPT2LMHeadModel(GPT2Config(**small))
        rows = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=6, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        assert arguments.parallel_mode.name == "DISTRIBUTED"
        outcome = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        assert len(outcome) == 6
        """,
    "accelerate": """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == dist.get_world_size() == 2
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        outcome = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - 1).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            everybodys = accelerator.gather_for_metrics(loss.detach().reshape(1))
            outcome += [accelerator.reduce(loss.detach(), "mean").item(), everybodys.sum().item()]
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        outcome += [parameter.sum().item() for parameter in model.parameters()]
        """,
}
FRAME = """
import json, sys
import torch
import torch.distributed as dist
import hpccomm.torch
backend, folder = sys.argv[1:]
hpccomm.torch.init_process_group(backend)
torch.manual_seed(0)
{program}
if dist.get_rank() == 0:
    print(json.dumps([dist.get_backend(), outcome]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_library_trains_as_with_gloo(library: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"there is no {library}")
    program = tmp_path / "program.py"
    program.write_text(FRAME.format(program=textwrap.dedent(PROGRAMS[library])), encoding="utf-8")
    outcomes: dict[str, Any] = {}
    for backend in ("gloo", "hpccomm"):
        ended = launch(2, sys.executable, program, backend, tmp_path / backend, timeout=120)
        if backend == "hpccomm":  # one job in ten over gloo ends in std::terminate, after it has printed
            assert ended.returncode == 0, ended.stderr
        (line,) = (
            line for line in ended.stdout.splitlines() if line.startswith('["')
        )  # the launcher may have more to say
        name, outcomes[backend] = json.loads(line)
        assert name == backend
    assert outcomes["hpccomm"] == pytest.approx(outcomes["gloo"], rel=1e-5)

"""mpi4py's own tests pass on GPU arrays but for those that are listed; the Makefile has fetched them from its sdist."""

from __future__ import annotations

import sys
from pathlib import Path

import mpi4py
import pytest

from ..foreign.suite import read
from ..launch import IMITATED_GPU, ROOT, launch
from . import gpus
from .mpi4pys_own import DIFFERENT, MODULES, NOT_RUN

FOLDER = ROOT / "build" / "foreign" / f"mpi4py-{mpi4py.__version__}" / "test"

pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(
        not FOLDER.exists(), reason=f"mpi4py's tests are not in {FOLDER}: rm .venv/.test; make .venv/.test"
    ),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_mpi4pys_own_tests(ranks: int, tmp_path: Path) -> None:
    if ranks > gpus.connectable(ranks):
        pytest.skip(f"needs {ranks} GPUs")
    environment = {} if gpus.is_real() else IMITATED_GPU
    ended = launch(
        ranks,
        *(sys.executable, "-m", "tests.gpu.mpi4pys_own", FOLDER, tmp_path / "outcomes"),
        timeout=gpus.PATIENCE,
        env={**environment, "HPCCOMM_TIMEOUT": "60", "HPCCOMM_DEBUG_DIR": str(tmp_path)},
    )
    seen = read(str(tmp_path / "outcomes"), ranks)
    different = {key: outcome for key, outcome in seen.items() if outcome != "passed"}
    unexpected = {key: outcome for key, outcome in different.items() if key[1].split(".")[-1] not in DIFFERENT}
    assert not unexpected, f"{unexpected}\n{ended.stderr}"
    assert ended.returncode == 0, ended.stderr
    assert {name.split(".")[0] for _, name in seen} == set(MODULES)
    assert not [key for key in seen if key[1].split(".")[-1] in DIFFERENT and key not in different]
    assert {name.split(".")[-1] for _, name in different} == DIFFERENT.keys()
    assert all(f"def {name}(self)" in (FOLDER / "test_p2p_buf.py").read_text() for name in NOT_RUN)

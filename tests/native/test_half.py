"""Half precisions are converted alike with and without the processor's instructions for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

pytestmark = pytest.mark.once
COMPILER = shutil.which(os.environ.get("CC", "cc"))


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_every_machine_converts_half_precisions_alike(tmp_path: Path) -> None:
    program = tmp_path / "half_conversions"
    source, headers = Path(__file__).with_name("half_conversions.c"), ROOT / "hpccomm" / "native"
    subprocess.run([str(COMPILER), "-O2", f"-I{headers}", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

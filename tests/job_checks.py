"""What every job in jobs/ has to do, whichever environment its tests need."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from .launch import launch


def assert_failure_on_every_rank(
    job: str, arguments: list[str], breakage: str = "", env: Mapping[str, str] | None = None, timeout: float = 60
) -> str:
    """Run a job on 2 ranks, require that it says WRONG and that both end with status 1, and return what it printed."""
    program = f"""
import runpy, sys, textwrap
import numpy as np
import hpccomm as hc
exec(textwrap.dedent({breakage!r}))
sys.argv = ["{job}.py", *{arguments!r}]
try:
    runpy.run_path("jobs/{job}.py", run_name="__main__")
except SystemExit as end:
    print(f"ended with {{end.code}}", flush=True)
    raise
"""
    ended = launch(2, sys.executable, "-c", program, env=env, timeout=timeout)
    assert ended.returncode == 1, f"{ended.stdout}\n{ended.stderr}"
    assert "WRONG" in ended.stdout
    assert ended.stdout.count("ended with 1") == 2
    return ended.stdout


def assert_help_shows_the_command_to_type(job: str) -> None:
    ended = launch(1, sys.executable, f"jobs/{job}.py", "--help")
    assert ended.returncode == 0
    assert f"python jobs/{job}.py" in ended.stdout

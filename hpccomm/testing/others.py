"""Other plugins of pytest: only rank 0 writes files, and all ranks draw the same random numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

# Options that make pytest and its plugins write, with their values on ranks other than 0. Otherwise all ranks would
# write to the same file, or remove each other's files.
WRITE = {
    "xmlpath": None,  # --junitxml
    "log_file": os.devnull,
    "pastebin": None,
    "cacheclear": False,
    "report_log": None,  # pytest-reportlog
    "htmlpath": None,  # pytest-html
    "json_report": False,  # pytest-json-report
    "allure_report_dir": None,  # allure-pytest
}
# Options of seeds that a plugin draws itself, with the value that makes it draw; other plugins have a fixed default.
DRAWN = {"randomly_seed": "default", "hypothesis_seed": None}
HYPOTHESIS_SEED = pytest.StashKey[int]()


def prepare(config: pytest.Config, comm: MPI.Intracomm) -> None:
    """Set the options of plugins before plugins are configured."""
    rank, options = comm.Get_rank(), vars(config.option)
    for name, value in WRITE.items():
        if rank and name in options:
            options[name] = value
    seeds = {name: value for name, value in options.items() if "seed" in name}
    for name, value in DRAWN.items():
        if name in seeds and seeds[name] == value:
            seeds[name] = random.SystemRandom().getrandbits(32)
    seeds = comm.bcast(seeds)
    if "hypothesis_seed" in seeds and options.get("hypothesis_seed") is None:
        # kept for tests that use hypothesis: as an option, it would import hypothesis in every run
        config.stash[HYPOTHESIS_SEED] = seeds.pop("hypothesis_seed")
    options.update(seeds)
    if options.get("basetemp"):  # pytest first removes this folder
        Path(options["basetemp"]).mkdir(mode=0o700, parents=True, exist_ok=True)
        options["basetemp"] = str(Path(options["basetemp"], f"rank-{rank}"))


def leave_files_to_rank_0(config: pytest.Config, rank: int, meet: Callable[[], None]) -> None:
    """Let only rank 0 write pytest's cache and combine all ranks' coverage; `meet` is a barrier."""
    cache: Any = getattr(config, "cache", None)
    if rank and cache is not None:
        cache.set = lambda key, value: None
    coverage: Any = config.pluginmanager.getplugin("_cov")  # from pytest-cov
    controller = getattr(coverage, "cov_controller", None)
    if controller is None:
        return
    combine = controller.finish

    def finish() -> None:
        if rank:
            controller.pause()
            controller.cov.save()
        meet()
        if not rank:
            combine()

    controller.finish = finish
    if rank:
        coverage.options.cov_report, coverage.options.cov_fail_under = {}, None

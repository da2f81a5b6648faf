from __future__ import annotations

import importlib

import numpy as np
import pytest

import hpccomm as hc


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any("tests/gpu/" in report.nodeid for report in terminalreporter.stats.get("passed", [])):
        terminalreporter.section("GPU arrays")
        terminalreporter.write_line(f"tests/gpu ran on {importlib.import_module('tests.gpu.gpus').mode()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs --slow"))


@pytest.fixture(scope="module")
def groups(process_group: hc.ProcessGroup) -> list[hc.ProcessGroup]:
    """The world, a group of two in reverse order, and a group of one: those that this rank is in."""
    last = process_group.size - 1
    made = [
        process_group,
        hc.new_group([last, 0][: process_group.size], sort_ranks=False, group_desc="reversed"),
        hc.new_group([last], group_desc="alone"),
    ]
    return [group for group in made if isinstance(group, hc.ProcessGroup)]


@pytest.fixture
def random(process_group: hc.ProcessGroup) -> np.random.Generator:
    """The same random numbers on every rank."""
    return np.random.default_rng(7)

"""The tests of GPU arrays: on a real GPU where there is one, otherwise on the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

cupy = pytest.importorskip("cupy")

from hpccomm.cuda import seam  # noqa: E402

from . import gpus  # noqa: E402


@pytest.fixture(scope="package", autouse=True)
def _provider() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not gpus.is_real():
            patch.setenv("HPCCOMM_GPU_PROVIDER", "tests.gpu.stand_in")
        forget_provider()
        yield
    forget_provider()


def forget_provider() -> None:
    seam.runtime.cache_clear()
    seam.nccl.cache_clear()


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    """Fail the test in which two uses of the same memory were not ordered."""
    yield
    if not gpus.is_real():
        from .stand_in import MACHINE

        races, MACHINE.races = MACHINE.races, []
        assert not races


@pytest.fixture
def machine() -> Iterator[Any]:
    """The stand-in's machine, for tests of what no real one does on demand; its settings are reset afterwards."""
    if gpus.is_real():
        pytest.skip("needs the stand-in")
    from .stand_in import MACHINE, Machine

    MACHINE.calls.clear()
    yield MACHINE
    fresh = Machine()
    for setting in ("devices", "identities", "device", "held", "version", "has_all_to_all", "failures", "async_error"):
        setattr(MACHINE, setting, getattr(fresh, setting))

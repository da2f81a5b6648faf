"""GPU arrays in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm import checkpoint

from ..arrays import LAYOUTS, assert_same, uneven, values
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("layout", [*LAYOUTS, uneven], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_gpu_arrays_are_saved_as_the_current_stream_has_them(tmp_path: Path, layout: Any, how: str) -> None:
    folder = [tmp_path]
    hc.broadcast_object_list(folder)
    expected = {str(shape): values(np.dtype("f4"), shape, hc.get_rank()) for shape in ((3, 4), (5,), (0, 3))}
    same = np.asarray(values(np.dtype("i8"), (), 0))
    with gpus.another_stream():
        arrays = {name: gpus.array(np.zeros_like(each), layout) for name, each in expected.items()}
        for name, each in expected.items():
            gpus.write(arrays[name], each)  # the save waits for it
        getattr(checkpoint, how)(folder[0], arrays, 1, replicated={"0-d": gpus.array(same), "host": np.ones(3)})
        for each in arrays.values():  # the program goes on
            gpus.write(each, np.zeros(each.shape, each.dtype))
    found = checkpoint.load(folder[0])
    for name, each in expected.items():
        assert_same(found.arrays[name], each, name)
    assert_same(found.replicated["0-d"], same)
    assert_same(found.replicated["host"], np.ones(3))

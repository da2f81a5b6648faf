"""Pictures: time and bandwidth against size, one line for each contender."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row


def plot(rows: Sequence[Row], file: str | Path, title: str = "") -> None:
    """Write a picture with one line of two plots for each benchmark that has more than one size."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")

    names = list(dict.fromkeys(each.benchmark for each in rows if each.size_bytes and each.median_us is not None))
    figure, axes = pyplot.subplots(max(1, len(names)), 2, figsize=(11, 3.6 * max(1, len(names))), squeeze=False)
    for (time, rate), name in zip(axes, names, strict=False):
        for contender in dict.fromkeys(each.contender for each in rows if each.benchmark == name):
            _lines(time, rate, [each for each in rows if (each.benchmark, each.contender) == (name, contender)])
        for axis, what in ((time, "time (us, median)"), (rate, "bus bandwidth (GB/s)")):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("size (bytes)")
            axis.set_ylabel(what)
            axis.set_title(name)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend()
        time.set_yscale("log")
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _lines(time: Any, rate: Any, rows: Sequence[Row]) -> None:
    measured = [each for each in rows if each.median_us is not None]
    if not measured:
        return
    sizes = [each.size_bytes for each in measured]
    label = measured[0].contender
    (line,) = time.plot(sizes, [each.median_us for each in measured], marker="o", markersize=3, label=label)
    lowest, highest = [each.min_us for each in measured], [each.p99_us for each in measured]
    time.fill_between(sizes, lowest, highest, alpha=0.12, color=line.get_color())
    rate.plot(sizes, [each.busbw_gbs for each in measured], marker="o", markersize=3, label=label)

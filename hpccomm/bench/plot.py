"""Plots of time and bandwidth against size, with one line for each contender."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ..debug.words import size_in_words
from .report import Row


def plot(rows: Sequence[Row], file: str | Path, title: str = "") -> None:
    """Write an image with two plots for each benchmark that has arrays."""
    pyplot = pyplot_without_display()
    ticker = importlib.import_module("matplotlib.ticker")

    names = list(dict.fromkeys(each.benchmark for each in rows if each.size_bytes and each.median_us is not None))
    lines = max(1, len(names))
    figure, axes = pyplot.subplots(lines, 2, figsize=(11, 3.6 * lines + 0.6), squeeze=False, layout="constrained")
    for (time, rate), name in zip(axes, names, strict=False):
        for contender in dict.fromkeys(each.contender for each in rows if each.benchmark == name):
            _lines(time, rate, [each for each in rows if (each.benchmark, each.contender) == (name, contender)])
        time.set_title(f"{name}: median time\n(band: fastest to 99th percentile)", fontsize=10)
        rate.set_title(f"{name}: bus bandwidth\n(of the median)", fontsize=10)
        for axis, label in ((time, ""), (rate, "GB/s")):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
            axis.xaxis.set_major_formatter(lambda size, _: size_in_words(size))
            axis.xaxis.set_minor_locator(ticker.NullLocator())
            axis.set_xlabel("size")
            axis.set_ylabel(label)
            axis.set_yscale("log")  # also for bandwidth: a memory copy is far faster than any transport
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend()
        time.yaxis.set_major_formatter(lambda us, _: microseconds_in_words(us))
        rate.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        rate.yaxis.set_minor_formatter(ticker.NullFormatter())
    facts = title.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")  # break between facts only
    figure.suptitle(fill(facts, 130, break_long_words=False, break_on_hyphens=False), fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def problem_of(file: str) -> str | None:
    """Return the reason why no image can be written with this name, or None."""
    canvas = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase
    formats, ending = canvas.get_supported_filetypes(), Path(file).suffix[1:].lower()
    return f"{file}: expected the ending {', '.join(formats)}" if ending and ending not in formats else None


def microseconds_in_words(us: float) -> str:
    """Return a time as text, with a unit that makes the number short.

    >>> [microseconds_in_words(us) for us in (0.1, 10, 100_000, 2e6)]
    ['0.1 us', '10 us', '100 ms', '2 s']
    """
    factor, unit = (1, "us") if us < 1e3 else (1e3, "ms") if us < 1e6 else (1e6, "s")
    return f"{us / factor:g} {unit}"


def pyplot_without_display() -> Any:
    """Return matplotlib's pyplot, configured to draw to files."""
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


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

"""Write the drawings of docs/images: ``python docs/drawings.py``; with ``--check`` compare them.

An image on a page can't know the page's theme. So the background is transparent, lines and labels have a grey with the
same contrast to white and to black, and white text stands on colours only.
"""

from __future__ import annotations

import math
import re
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from generated import write

DOCS = Path(__file__).parent
GREY, DARK, RED = "#7a7a7a", "#5f6368", "#c0392b"
BLUE, GREEN, PURPLE, BROWN = COLOURS = "#4477aa", "#228833", "#aa3377", "#a65d00"  # of ranks 0 to 3
LETTERS = "abcd"
CELL, STEP = 27, 30  # pixels of an array of the collectives, and from one to the next


class Drawing:
    """The shapes of one image, drawn one above the other."""

    def __init__(self, width: float, height: float) -> None:
        self.size = width, height
        self.shapes: list[str] = []

    def text(self, x: float, y: float, text: str, *, size: int = 13, fill: str = GREY, anchor: str = "middle") -> None:
        """Write a text; code, in backquotes, gets a font of equal widths. `y` is its middle."""
        font = "monospace" if text.startswith("`") else "sans-serif"
        attributes = f'text-anchor="{anchor}" font-family="{font}" font-size="{size}" fill="{fill}"'
        at = f'x="{x:g}" y="{y + 0.35 * size:.1f}"'
        self.shapes.append(f"<text {at} {attributes}>{escape(text.strip('`'), quote=False)}</text>")

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", fill: str = "", dashed: bool = False
    ) -> None:
        """Draw a box: filled, with white text, or only its outline, with grey text."""
        style = f'fill="{fill}"' if fill else f'fill="none" stroke="{GREY}"' + ' stroke-dasharray="4 3"' * dashed
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {style}/>')
        lines = text.split("\n")
        for i, line in enumerate(lines if text else []):
            middle = y + height / 2 + 16 * (i - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, size=13 if i == 0 else 11, fill="#ffffff" if fill else GREY)

    def line(self, *points: tuple[float, float], colour: str = GREY, width: float = 1.5, dashed: bool = False) -> None:
        """Draw a line through points."""
        style = f'fill="none" stroke="{colour}" stroke-width="{width:g}"' + ' stroke-dasharray="6 4"' * dashed
        self.shapes.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" {style}/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a line with a head at its end."""
        self.line(start, end)
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        sides = [(end[0] - 8 * math.cos(angle + turn), end[1] - 8 * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [end, *sides])
        self.shapes.append(f'<polygon points="{corners}" fill="{GREY}"/>')

    def as_svg(self) -> str:
        """Return the text of the file."""
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        return "\n".join([f'{head}width="{width:g}" height="{height:g}">', *self.shapes, "</svg>\n"])


def groups() -> Drawing:
    """The world, and the groups of its rows and columns."""
    drawing = Drawing(766, 176)
    for panel, (name, call) in enumerate([
        ("world", "`init_process_group()`"),
        ("rows", "`split_group(color=rank // 3)`"),
        ("columns", "`split_group(color=rank % 3)`"),
    ]):  # fmt: skip
        left = 4 + 256 * panel
        drawing.text(left + 122, 14, name, size=15)
        drawing.text(left + 122, 164, call, size=12)
        outlines = {
            "world": [(0, 0, 3, 2)],
            "rows": [(0, 0, 3, 1), (0, 1, 3, 1)],
            "columns": [(i, 0, 1, 2) for i in range(3)],
        }
        for column, row, wide, high in outlines[name]:
            drawing.box(left + 82 * column, 28 + 62 * row, 82 * wide - 2, 62 * high - 4, dashed=True)
        for rank in range(6):
            row, column = divmod(rank, 3)
            color, inside = {"world": (0, rank), "rows": (row, column), "columns": (column, row)}[name]
            text = f"rank {rank}" + f"\ngroup rank {inside}" * (name != "world")
            drawing.box(left + 82 * column + 3, 31 + 62 * row, 74, 52, text, COLOURS[color])
    return drawing


def collectives() -> Drawing:
    """Arrays of four ranks before and after each of six kinds of collectives; None: a rank has no array there."""
    a, b, c, d = own = [[letter] for letter in LETTERS]
    parts = [[f"{letter}{i}" for i in range(4)] for letter in LETTERS]
    nothing: list[str] = []
    drawing = Drawing(750, 540)
    panels = [
        ("broadcast", [a, [""], [""], [""]], {"": [a] * 4}),
        ("scatter", [[*LETTERS], nothing, nothing, nothing], {"": own}),
        ("reduce, all_reduce", own, {"reduce": [["sum"], b, c, d], "all_reduce": [["sum"]] * 4}),
        ("gather, all_gather", own, {"gather": [[*LETTERS], [], [], []], "all_gather": [[*LETTERS]] * 4}),
        ("reduce_scatter", parts, {"": [[f"sum{i}"] for i in range(4)]}),
        ("all_to_all", parts, {"": [list(column) for column in zip(*parts)]}),
    ]
    for i, (name, before, results) in enumerate(panels):
        left, top = 10 + 365 * (i % 2), 180 * (i // 2)
        drawing.text(left + 175, top + 14, name, size=15)
        for rank in range(4):
            drawing.text(left + 40, top + 60 + STEP * rank, f"rank {rank}", size=12, anchor="end")
        right = arrays(drawing, left + 50, top + 46, before)
        for title, after in results.items():
            if title in ("", *list(results)[:1]):
                drawing.arrow((right + 6, top + 105), (right + 34, top + 105))
                right += 42
            drawing.text(right + STEP * max(map(len, after)) / 2, top + 35, title, size=11)
            right = max(right + 70, arrays(drawing, right, top + 46, after) + 14)
    return drawing


def arrays(drawing: Drawing, left: float, top: float, rows: list[list[str]]) -> float:
    """Draw the arrays of four ranks, coloured by the rank that they come from; return the right end."""
    for rank, row in enumerate(rows):
        for column, name in enumerate(row):
            is_sum = name.startswith("sum")
            text = name.replace("sum", "Σ")
            colour = DARK if is_sum else COLOURS[LETTERS.index(name[0])] if name else ""
            drawing.box(left + STEP * column, top + STEP * rank, CELL, CELL, text, colour, dashed=True)
    return left + STEP * max(map(len, rows))


def devices() -> Drawing:
    """One call; the device of its array selects the backend."""
    drawing = Drawing(700, 142)
    for left, rank in ((4, 0), (546, 1)):
        drawing.box(left, 4, 150, 132, dashed=True)
        drawing.text(left + 75, 18, f"rank {rank}", size=12)
        drawing.box(left + 12, 32, 126, 42, "NumPy array\nhost memory", BLUE)
        drawing.box(left + 12, 84, 126, 42, "CuPy array\nGPU memory", GREEN)
    for y, array, backend, entry, colour in (
        (53, "host", "MPI", "cpu:mpi", BLUE),
        (105, "gpu", "NCCL", "cuda:nccl", GREEN),
    ):
        drawing.arrow((300, y), (146, y))
        drawing.arrow((400, y), (554, y))
        drawing.box(300, y - 15, 100, 30, backend, colour)
        drawing.text(227, y - 12, f"`hc.all_reduce({array})`", size=11)
        drawing.text(473, y - 12, f"`{entry}`", size=11)
    return drawing


def overlap() -> Drawing:
    """A blocking operation, and an asynchronous one that overlaps with work."""
    drawing = Drawing(700, 222)
    drawing.text(10, 14, "`all_reduce(x)`", anchor="start")
    drawing.text(120, 45, "program", size=12, anchor="end")
    drawing.box(130, 30, 250, 30, "all_reduce", BLUE)
    drawing.box(384, 30, 200, 30, "compute", GREEN)
    drawing.box(588, 30, 70, 30, "use x", PURPLE)
    drawing.text(10, 92, "`work = all_reduce(x, async_op=True)`", anchor="start")
    drawing.text(120, 123, "program", size=12, anchor="end")
    drawing.box(130, 108, 36, 30, "call", BLUE)
    drawing.box(170, 108, 200, 30, "compute", GREEN)
    drawing.box(374, 108, 40, 30, "wait", BLUE)
    drawing.box(418, 108, 70, 30, "use x", PURPLE)
    drawing.text(120, 157, "communication", size=12, anchor="end")
    drawing.box(156, 142, 250, 30, "all_reduce", BLUE)
    for x in (130, 414):
        drawing.line((x, 176), (x, 188))
    drawing.line((130, 182), (414, 182))
    drawing.text(272, 198, "do not read or write x", size=12)
    drawing.arrow((470, 212), (680, 212))
    drawing.text(575, 202, "time", size=12)
    return drawing


def checkpoints() -> Drawing:
    """Files on the nodes' own storage, a copy on the next node, and the shared folder."""
    drawing = Drawing(700, 246)
    for node in range(3):
        left = 10 + 232 * node
        drawing.box(left, 10, 216, 146, dashed=True)
        drawing.text(left + 108, 24, f"node {node}, own storage (local=)", size=12)
        drawing.box(left + 12, 40, 192, 42, f"files of node {node}'s ranks\nevery checkpoint", COLOURS[node])
        drawing.box(
            left + 12, 102, 192, 42, f"copy of node {(node - 1) % 3}'s files\npartner=True", COLOURS[(node - 1) % 3]
        )
        drawing.arrow((left + 108, 158), (left + 108, 196))
        if node < 2:
            drawing.arrow((left + 206, 70), (left + 242, 114))
    drawing.box(10, 200, 680, 38, "shared folder: every tenth checkpoint", DARK)
    return drawing


def spares() -> Drawing:
    """A spare that takes the rank of a dead process."""
    drawing = Drawing(700, 200)
    rows = [
        ("`init_process_group(spares=2)`", ["rank 0", "rank 1", "rank 2", "rank 3", "spare", "spare"]),
        ("process 2 dies: RankFailedError", ["rank 0", "rank 1", "dead", "rank 3", "spare", "spare"]),
        ("`replace_failed(world)`", ["rank 0", "rank 1", "dead", "rank 3", "rank 2", "spare"]),
    ]
    for process in range(6):
        drawing.text(277 + 76 * process, 12, f"process {process}", size=12)
    for i, (title, states) in enumerate(rows):
        drawing.text(228, 47 + 60 * i, title, size=12, anchor="end")
        for process, state in enumerate(states):
            is_rank = state.startswith("rank")
            fill = COLOURS[int(state[-1])] if is_rank else RED if state == "dead" else ""
            drawing.box(244 + 76 * process, 28 + 60 * i, 66, 38, state, fill, dashed=True)
    return drawing


def all_reduce() -> Drawing:
    """The time of all_reduce against its size, with hpccomm and with mpi4py, as recorded."""
    text = (DOCS / "benchmarks" / "mpich-all_reduce.txt").read_text(encoding="utf-8")
    heads = next(line.split() for line in text.splitlines() if line.split()[:1] == ["size"])
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d", line)]
    machine = re.search(r"\d+ ranks on .*?, (.*?, mpi4py [\d.]+)", text)
    assert (heads[2], heads[7]) == ("time", "mpi4py"), "the columns of the file have changed"
    assert machine
    drawing = Drawing(660, 330)

    def at(size: float, microseconds: float) -> tuple[float, float]:
        return 70 + 500 * math.log(size / 8) / math.log((256 << 20) / 8), 270 - 40 * math.log10(microseconds / 0.1)

    for power, label in enumerate(["0.1 us", "1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms"], -1):
        y = at(8, 10.0**power)[1]
        drawing.line((70, y), (570, y), width=0.4)
        drawing.text(62, y, label, size=11, anchor="end")
    for size, label in ((8, "8 B"), (512, "512 B"), (32 << 10, "32 KiB"), (2 << 20, "2 MiB"), (128 << 20, "128 MiB")):
        drawing.text(at(size, 0.1)[0], 284, label, size=11)
    for name, column, colour in (("hpccomm", 2, BLUE), ("mpi4py", 7, BROWN)):
        points = [at(float(row[0]), float(row[column])) for row in rows]
        drawing.line(*points, colour=colour, width=2.5, dashed=name == "mpi4py")
        drawing.text(points[-1][0] + 8, points[-1][1], name, size=15, fill=colour, anchor="start")
    drawing.text(320, 12, "Time of all_reduce (sum of float32) on 2 ranks: lower is better", size=14)
    drawing.text(320, 312, f"{machine[1]}; both axes are logarithmic", size=11)
    return drawing


DRAWINGS = groups, collectives, devices, overlap, checkpoints, spares, all_reduce

if __name__ == "__main__":
    for function in DRAWINGS:
        write(DOCS / "images" / f"{function.__name__}.svg", function().as_svg())

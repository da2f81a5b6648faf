"""Write the cheat sheet as a PDF of one page: ``python docs/cheat_sheet.py FILE.pdf``; `make docs` does so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fpdf import FPDF

PAGE = Path(__file__).parent / "reference" / "cheat-sheet.md"
LEFT, RIGHT, TOP, BOTTOM = 14, 196, 16, 285  # of an A4 page, in mm
REMARK = 128  # left edge of the second column
LINE, GAP = 5.3, 2.2  # height of a row, space above a table


def write(file: Path) -> None:
    """Write the PDF; raise ValueError if the tables do not fit on one page."""
    pdf = FPDF(format="A4")
    pdf.set_auto_page_break(False)
    pdf.set_title("hpccomm: cheat sheet")
    pdf.add_page()
    pdf.set_font("helvetica", "B", 15)
    pdf.text(LEFT, TOP, "hpccomm: cheat sheet")
    y = TOP + GAP
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.M):
        heading, _, *rows = table.splitlines()
        y += GAP + LINE
        pdf.set_fill_color(225, 232, 240)
        pdf.rect(LEFT - 1, y - 4, RIGHT - LEFT + 2, LINE, style="F")
        draw(pdf, y, heading, "B")
        for row in rows:
            y += LINE
            draw(pdf, y, row)
    if y > BOTTOM:
        raise ValueError(f"{PAGE.name} needs {y:.0f} mm of the page, which has {BOTTOM} mm")
    file.parent.mkdir(parents=True, exist_ok=True)
    pdf.output(str(file))


def draw(pdf: FPDF, y: float, row: str, style: str = "") -> None:
    """Draw the two cells of a row: code in Courier, text in Helvetica, links as their text."""
    for x, end, cell in zip((LEFT, REMARK), (REMARK, RIGHT), row.strip("| ").split(" | ")):
        for number, part in enumerate(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).split("`")):
            if number % 2:
                pdf.set_font("courier", style, 8.5)
            else:
                pdf.set_font("helvetica", style, 9)
            pdf.text(x, y, part)
            x += pdf.get_string_width(part)
        if x > end:
            raise ValueError(f"{PAGE.name}: {cell!r} is {x - end:.0f} mm too long for its column of the PDF")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Write the page of the command line, docs/reference/command-line.md, from its parsers; ``--check`` compares it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hpccomm.cli.main import COMMANDS, Parser
from hpccomm.core import late

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from generated import write

FILE = Path(__file__).parent / "reference" / "command-line.md"
TITLES = {"positional arguments": "argument", "options": "option"}
PAGE = """\
# Command line

`hpccomm COMMAND`, or `python -m hpccomm COMMAND`; `hpccomm COMMAND --help` prints the options, and `hpccomm --version`
the version.

{commands}

{sections}

This page is generated from the parsers in `hpccomm`, and `make lint` compares the two. To make it again:

```console
$ python docs/command_line_page.py
```
"""


def as_markdown() -> str:
    """Return the page."""
    parsers = {name: Parser(prog=f"hpccomm {name}") for name in COMMANDS}
    for name, command in COMMANDS.items():
        late.late(command.module).add_arguments(parsers[name])
    commands = table("command", [(f"[`{name}`](#hpccomm-{name})", each.summary) for name, each in COMMANDS.items()])
    sections = "\n\n".join(part for parser in parsers.values() for part in section(parser, "##"))
    return PAGE.format(commands=commands, sections=sections)


def section(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    """Yield the parts of a parser's section, and those of its commands."""
    yield f"{heading} {parser.prog}"
    yield escaped(parser.description or "")
    yield f"```text\n{usage(parser)}\n```"
    commands: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                commands = action.choices
            elif action.dest != "help" and action.help != argparse.SUPPRESS:
                rows.append((f"`{invocation(action)}`", action.help or ""))
        if rows:
            yield table(TITLES.get(group.title or "", group.title or ""), rows)
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"
    for command in commands.values():
        yield from section(command, f"{heading}#")


def usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage on one line; argparse's own text depends on the version of Python."""
    if parser.usage:
        return parser.usage
    words = [invocation(action) for action in parser._get_positional_actions()]
    required = [invocation(action) for action in parser._get_optional_actions() if action.required]
    has_options = len(parser._get_optional_actions()) > 1  # --help is one
    return " ".join([parser.prog, *["[options]"] * has_options, *required, *words])


def invocation(action: argparse.Action) -> str:
    """Return an option with its value, or a positional argument."""
    value = str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))
    if action.choices and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.option_strings:
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {'...' if action.metavar == '' else value}"
    return {"?": f"[{value}]", "*": f"[{value} ...]", argparse.REMAINDER: f"{value} ..."}.get(str(action.nargs), value)


def table(head: str, rows: list[tuple[str, str]]) -> str:
    """Return a table with two columns, a name and a text."""
    lines = [f"| {name} | {escaped(text.replace('%%', '%'))} |" for name, text in rows]
    return "\n".join([f"| {escaped(head)} | |", "|---|---|", *lines])


def escaped(text: str) -> str:
    """Return a text without a meaning in Markdown."""
    return re.sub(r"([\\`*|<])", r"\\\1", text.strip())


if __name__ == "__main__":
    write(FILE, as_markdown())

"""The command line before a subcommand runs: help, version, typos."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import hpccomm as hc
from hpccomm.cli.main import COMMANDS, main, parsers_of

pytestmark = pytest.mark.serial


def test_without_arguments_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hpccomm {hc.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_subcommand_has_examples_that_its_parser_accepts(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    examples = [line.split(" hpccomm ") for line in shown.partition("\nexamples:\n")[2].splitlines()]
    assert len(examples) > 1
    for before, words in examples:
        assert before.strip() in ("", "mpiexec -n 4")
        parser, _ = parsers_of([name])
        assert parser.parse_args(words.split()).command == name


def test_completion_without_shtab_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 2
    assert "error: --print-completion needs shtab: pip install shtab\n" in capsys.readouterr().err


def test_completion_gets_the_parser_with_all_options_of_all_subcommands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a module that has shtab's function."""

    def complete(parser: argparse.ArgumentParser, shell: str) -> str:
        return f"{shell}: {vars(parser.parse_args(['debug', '--pid', '3']))['pid']} {parser.parse_args(['info']).json}"

    monkeypatch.setitem(sys.modules, "shtab", SimpleNamespace(complete=complete))
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "zsh"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "zsh: 3 False\n")


def test_without_stdout_a_command_has_its_usual_status() -> None:
    program = "import sys; sys.stdout = None; from hpccomm.cli.main import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_summary_begins_with_a_verb() -> None:
    verbs = [command.summary.split()[0].rstrip(",") for command in COMMANDS.values()]
    assert verbs == ["run", "show", "compare", "name", "show", "write", "list", "measure"]


@pytest.mark.parametrize(
    ("arguments", "usage", "error"),
    [
        (["trcae", "x"], "usage: hpccomm [", "there is no subcommand 'trcae'; did you mean trace?"),
        (["zzz"], "usage: hpccomm [", "there is no subcommand 'zzz'\n"),
        (["info", "--jsno"], "usage: hpccomm info", "there is no option --jsno; did you mean --json?"),
        (["bench", "--overhaed"], "usage: hpccomm bench", "there is no option --overhaed; did you mean --overhead?"),
        (["bench", "--buget=3"], "usage: hpccomm bench", "there is no option --buget=3; did you mean --budget?"),
        (
            ["checkpoint", "list", "x", "--jsn"],
            "usage: hpccomm checkpoint list",
            "no option --jsn; did you mean --json?",
        ),
        (
            ["checkpoint", "list", "x", "--step"],
            "usage: hpccomm checkpoint list",
            "there is no option --step; did you mean --help?",
        ),
        (
            ["run", "-n", "4", "x.py"],
            "usage: hpccomm run",
            "no option -n; mpiexec starts the ranks: mpiexec -n 4 hpccomm run",
        ),
        (["trace", "/x", "/y"], "usage: hpccomm trace", "/y is one argument too many\n"),
        (["trace", ".", "/y", "."], "usage: hpccomm trace", "too many; it takes one folder: . is the newest\n"),
        (["info", "--quite-different"], "usage: hpccomm info", "there is no option --quite-different\n"),
    ],
)
def test_a_typo_names_the_nearest_and_shows_the_usage_of_that_subcommand(
    arguments: list[str], usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(usage)
    assert error in said


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *[("run", "--timeout", value) for value in ("abc", "0", "-1", "nan", "inf")],
        ("run", "--hook", "module.function"),
        ("run", "--log", "/no/such/folder/log"),
        *[("top --pid 1", "--interval", value) for value in ("abc", "0", "-1", "nan")],
        ("run", "--on-timeout", "stop"),
        *[("run", "--only-ranks", value) for value in ("3-1", "0,", "-1", "1-99999999")],
        ("run", "--pdb", "all"),
        ("debug", "--pid", "abc"),
        ("checkpoint verify /tmp", "--step", "last"),
        ("bench", "--iterations", "0"),
        ("bench", "--budget", "abc"),
        ("slurm", "--nodes", "two"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_name_of_its_option(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), f"{option}={value}"])
    assert ended.value.code == 2
    assert re.search(rf"error: argument (-\w/|-\w, )?{option}(/-\w)?: ", capsys.readouterr().err)

"""The protocol of collectives in memory of a node, with threads as ranks, under the compiler's sanitizers."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT, clean_environment, time_limit

pytestmark = pytest.mark.once

HEADERS = [
    ROOT / "hpccomm" / "native" / name
    for name in ("meet.h", "node.h", "halves.h", "sleep.h", "fold.h", "half.h", "cpu.h")
]
PROGRAM = Path(__file__).with_name("node_threads.c")
COMPILER = shutil.which(os.environ.get("CC", "cc"))

# What a change leaves out, what is in the header, and what the change puts there.
MUTANTS = {
    "a flag is stored without release": (
        "FLAG_OF(rank), n->number, memory_order_release",
        "FLAG_OF(rank), n->number, memory_order_relaxed",
    ),
    "flags are loaded without acquire": ("memory_order_acquire", "memory_order_relaxed"),
    "sets are not alternated": ("+ (number & 1)) *", "+ (number & 0)) *"),
    "calls are noted in one place": ("int set = n->number & 1;", "int set = 0;"),
    "rounds are not compared": ("node_show(n, call, bytes + at,", "node_show(n, call, bytes,"),
    "the next set is not waited for": ("n->settled + sets > n->number", "1"),
    "parts are taken before they are there": (
        "if ((code = node_wait(n, &other->begun, n->number)))\n            return code;",
        "",
    ),
    "shares are taken before they are reduced": (
        "for (int rank = 0; rank < n->ranks; rank++)\n        if ((code = node_wait(n, &n->flags[rank].reduced",
        "for (int rank = 0; rank < 0; rank++)\n        if ((code = node_wait(n, &n->flags[rank].reduced",
    ),
    "the result is not waited for": (
        "if (others && (code = node_wait(n, &n->flags[rank].reduced, n->number)))\n                return code;",
        "",
    ),
}

# The same for ranks that meet in a tree.
TREE_MUTANTS = {
    "a rank does not wait for those below it": (
        "if ((code = node_wait(n, &below->arrived, n->number)))\n            return code;",
        "",
    ),
    "a rank arrives without release": (
        "&mine->arrived, n->number, memory_order_release",
        "&mine->arrived, n->number, memory_order_relaxed",
    ),
    "ranks are released without release": (
        "&mine->released, n->number, memory_order_release",
        "&mine->released, n->number, memory_order_relaxed",
    ),
    "a difference below is not seen": ("below->differing == n->number ||", ""),
    "a difference elsewhere is not seen": ("n->flags[n->above].differing == n->number", "0"),
}

# The same for ranks that may go on before the others.
AHEAD_MUTANTS = {
    "the next cell is not waited for": ("in_cell ? CELLS : SETS", "in_cell ? 8 * CELLS : SETS"),
    "a slot is used like a cell": ("in_cell ? CELLS : SETS", "CELLS"),
    "a giver is not waited for": ("int code = node_wait(n, &n->flags[rank].begun, n->number);", "int code = 0;"),
    "an earlier operation's cell is taken": ("->number == n->number ?", "->number != 0 ?"),
    "the number of a slot's values is not compared": ("other->number[n->number & 1] == n->number &&", ""),
}

# The same for ranks that sleep.
SLEEPING_MUTANTS = {
    "the last rank wakes nobody": ("atomic_load(FLAG_OF(other)) < n->number", "atomic_load(FLAG_OF(other)) > 0"),
    "a root wakes nobody": ("node_show(n, call, bytes + at, n->rank == root)", "node_show(n, call, bytes + at, 0)"),
    "a giver wakes nobody": ("offsetof(Flags, begun), 1)", "offsetof(Flags, begun), 0)"),
    "a sleeper does not count itself": ("atomic_fetch_add(&s->sleeping, 1);", ""),
    "a sleeper does not check again": ("if (atomic_load(flag) < number)\n", ""),
}
NEVER = -1  # a rank sleeps
TREE = -2  # nor here, and the ranks meet in a tree


def built(folder: Path, sanitizers: str, before: str = "", after: str = "") -> Path:
    """Return the program, with `before` replaced in the headers; skip the test where this machine cannot build it."""
    for header in HEADERS:
        text = header.read_text()
        (folder / header.name).write_text(text.replace(before, after) if before else text)
    program = folder / "node_threads"
    options = ["-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", f"-I{folder}"]
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    done = subprocess.run([COMPILER, *options, PROGRAM, "-o", program], capture_output=True, text=True, check=False)
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no library for {sanitizers}")
    assert done.returncode == 0, done.stderr
    return program


def run(
    program: Path, ranks: int, rounds: int, yields: int = NEVER, patience: int = 50
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["timeout", str(time_limit(60)), program, str(ranks), str(rounds), str(yields), str(patience)],
        capture_output=True,
        text=True,
        env={
            **clean_environment(),
            "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
            "LD_PRELOAD": "",
        },  # theirs comes first
        check=False,
    )


@pytest.mark.parametrize(
    ("sanitizers", "ranks", "yields"),
    [
        *itertools.product(["thread"], [2, 3, 5], [NEVER, 0]),
        *itertools.product(["address,undefined"], [5], [NEVER, 0]),
        ("thread", 5, TREE),
    ],
)
def test_nothing_is_read_before_it_is_written_and_no_wake_up_is_lost(
    tmp_path: Path, sanitizers: str, ranks: int, yields: int
) -> None:
    done = run(built(tmp_path, sanitizers), ranks, 1500, yields)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("mutant", [*MUTANTS, *AHEAD_MUTANTS, *TREE_MUTANTS])
def test_what_is_left_out_is_noticed(tmp_path: Path, mutant: str) -> None:
    before, after = (MUTANTS | AHEAD_MUTANTS | TREE_MUTANTS)[mutant]
    assert any(before in header.read_text() for header in HEADERS)
    ranks = 2 if mutant == "rounds are not compared" else 5 if mutant in TREE_MUTANTS else 3
    yields = 0 if mutant in AHEAD_MUTANTS else TREE if mutant in TREE_MUTANTS else NEVER
    done = run(built(tmp_path, "thread", before, after), ranks, 3000, yields)
    assert done.returncode == 66 or "wrong:" in done.stdout, (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("mutant", SLEEPING_MUTANTS)
def test_a_lost_wake_up_is_noticed(tmp_path: Path, mutant: str) -> None:
    before, after = SLEEPING_MUTANTS[mutant]
    done = run(built(tmp_path, "undefined", before, after), 3, 3000, yields=0, patience=2)
    assert "wrong:" in done.stdout, (done.returncode, done.stdout, done.stderr)


def test_in_a_tree_no_rank_loads_the_lines_of_all_others(tmp_path: Path) -> None:
    program = built(tmp_path, "undefined")
    said = {yields: run(program, 128, 0, yields).stdout.splitlines() for yields in (NEVER, TREE)}
    loads = {yields: [tuple(map(int, re.findall("[0-9]+", line))) for line in lines] for yields, lines in said.items()}
    # barrier, all_reduce and broadcast of 8 bytes: of all ranks together, and of the rank with most
    assert loads[NEVER] == [(128 * 128, 128), (128 * 255, 255), (128 * 128 + 2 * 127, 130)]
    assert loads[TREE] == [(2 * 127, 21), (3 * 127, 11 + 10 + 127), (3 * 127, 22)]

"""The faults: an event on rank 1 of three, its place, and the message that the user has to see.

A case is a program of its own. `docs/reliability.md` has a row for each, written by `tools/write-reliability`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

TIMEOUT = 3  # seconds, of the groups of a job that ends by it
PATIENT = 60  # seconds, where nothing may time out, however busy the machine is

PROGRAM = """\
import os, signal, sys, threading, time
import numpy as np
import hpccomm as hc
from mpi4py import MPI
r = MPI.COMM_WORLD.Get_rank()

def fault():
{fault}

def main():
{body}

{start}
"""

# The fault, and the message for it. A signal ends a process at once; the launcher reports it.
FAULTS: dict[str, tuple[str, str]] = {
    "exception": ("1 / 0", r"ZeroDivisionError: division by zero.*hpccomm: ZeroDivisionError on rank 1 ends the job"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", r"hpccomm: KeyboardInterrupt on rank 1 ends the job"),
    "exception in another thread": (
        "worker = threading.Thread(target=lambda: 1 / 0); worker.start(); worker.join(); time.sleep(600)",
        r"ZeroDivisionError.*{late}",
    ),
    "exception, the program has its own excepthook": (
        "sys.excepthook = lambda *error: print('mine', file=sys.stderr); 1 / 0",
        r"mine.*{late}",
    ),
    "sys.exit(3)": ("sys.exit(3)", "{late}"),
    "early return": ("return 'return'", "{late}"),
    "os._exit(5)": ("os._exit(5)", ""),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)", ""),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV); time.sleep(9)", ""),
    "SIGSTOP": ("os.kill(os.getpid(), signal.SIGSTOP)", "{late}.*its process is stopped"),
    "sleeps forever": ("time.sleep(600)", r"{late}.*it is in the program at .*program\.py:\d+ in fault"),
    "computes forever": ("while True: pass", r"{late}.*it is in the program at .*program\.py:\d+ in fault"),
}

# The operation in which the other ranks are, and the words of the verdict for it.
PLACES: dict[str, tuple[str, str]] = {
    "a collective": (
        """\
        world = hc.init_process_group()
        x = np.ones(1000)
        hc.all_reduce(x)
        if r == 1 and fault() == "return": return
        hc.all_reduce(x)
        """,
        "rank 1 never reached all_reduce #2 of 'world'",
    ),
    "a message": (
        """\
        world = hc.init_process_group()
        x = np.ones(1000)
        hc.all_reduce(x)
        if r == 1 and fault() == "return": return
        if r != 1: hc.recv(x, src=1)
        """,
        "rank 1 has not answered recv #1 of 'world'",
    ),
    "init": (
        """\
        if r == 1 and fault() == "return": return
        world = hc.init_process_group()
        """,
        "rank 1 never reached init_process_group",
    ),
    "destroy": (
        """\
        world = hc.init_process_group()
        hc.all_reduce(np.ones(1000))
        if r == 1 and fault() == "return": return
        world.destroy()
        """,
        "rank 1 never reached destroy of 'world'",
    ),
}

# Faults after which the program ends in order, and the status of a job whose other ranks are in destroy.
AS_DESTROY = {"early return": "ok", "sys.exit(3)": "error", "exception, the program has its own excepthook": "error"}

# Ranks that call different operations: rank 1's, the others', and the verdict, or the error of the node's memory.
AT_ONCE = r"rank \d of the group calls another operation"
DISAGREEMENTS: dict[str, tuple[str, str, str]] = {
    "skips a collective": ("pass", "hc.all_reduce(x)", rf"{AT_ONCE}|differ in operation #2 .*rank 1 calls barrier"),
    "calls another collective": (
        "hc.reduce(x, dst=0)",
        "hc.all_reduce(x)",
        rf"{AT_ONCE}|differ in operation #2 .*rank 1 calls reduce",
    ),
    "asynchronous on one side": (
        "hc.all_reduce(x, async_op=True).wait()",
        "hc.all_reduce(x)",
        r"differ in operation #2 .*rank 1 calls all_reduce \(.*asynchronous",
    ),
    "another group": (
        "hc.barrier(dp)",
        "hc.all_reduce(x)",
        r"rank 1 never reached all_reduce #2 of 'world'.* barrier #1 of 'dp'",
    ),
    "another order": (
        "hc.barrier(); hc.all_reduce(x)",
        "hc.all_reduce(x); hc.barrier()",
        rf"{AT_ONCE}|differ in operation #2 ",
    ),
    "a receive with another tag": (
        "hc.recv(x, src=0, tag=6)",
        "hc.send(x, dst=1, tag=5) if r == 0 else None",
        "recv #1 of 'world'",
    ),
}


@dataclass
class Case:
    """One program.

    Attributes
    ----------
    fault, place : str
        The words in the row of the table.
    fault_code, body : str
        The code of rank 1, and the program.
    said : str
        A regular expression that stderr has to match (dots match newlines).
    status : str
        ``"error"``: not 0, and not ended by the deadline; ``"ok"``: 0; ``"any"``: one of the two.
    lost : str
        The words in the column "lost".
    other : str
        A job that reaches its time limit in the same folder for reports, before this one or beside it.
    is_beside : bool
    timeout : int
        HPCCOMM_TIMEOUT.
    is_busy, is_slow : bool
        Whether it computes all the time, so that it has to run alone; and whether that takes long.
    """

    fault: str
    place: str
    body: str
    said: str
    fault_code: str = "pass"
    status: str = "error"
    lost: str = "the job; no result is wrong"
    ranks: int = 3
    other: str = ""
    is_beside: bool = False
    timeout: int = TIMEOUT
    is_busy: bool = False
    is_slow: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.place}" if self.place else self.fault

    def program(self, body: str = "") -> str:
        """Return its text, or that of the other job."""
        fault = textwrap.indent(self.fault_code, "    ")
        body = textwrap.indent(textwrap.dedent(body or self.body), "    ")
        return PROGRAM.format(fault=fault, body=body, start="main()")


def cases() -> Iterator[Case]:
    """Return every case."""
    for place, (body, late) in PLACES.items():
        for fault, (code, said) in FAULTS.items():
            expected, status = said.replace("{late}", late), "error"
            if place == "init":  # of a rank that has not called it, only that is known
                expected = late if "{late}" in said else said.partition(".*hpccomm")[0].replace("hpccomm: ", "")
                expected = expected.replace(" on rank 1 ends the job", "")
            elif place == "destroy" and fault in AS_DESTROY:  # the end of a program waits, as destroy
                expected, status = expected.partition(".*rank")[0].replace(late, ""), AS_DESTROY[fault]
            case = Case(fault, f"in {place}", body, expected, code, status)
            yield replace(case, lost="nothing", timeout=PATIENT) if status == "ok" else case
    for what, (one, others, said) in DISAGREEMENTS.items():
        body = f"""\
        world = hc.init_process_group()
        dp = hc.new_group(group_desc="dp")
        x = np.ones(100_000)
        hc.all_reduce(x)
        if r == 1:
            {one}
        else:
            {others}
        hc.barrier()
        """
        yield Case("one rank disagrees", what, body, said)

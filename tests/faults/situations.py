"""Situations: a program's surroundings, or its treatment of its own process; each is a case of the fault suite."""

from __future__ import annotations

from collections.abc import Iterator

from ..launch import UNTIL_IN_MPI
from .cases import PATIENT, TIMEOUT, Case

NOTHING = "nothing"
ENDS = r"{name}.*hpccomm: {name} on rank 1 ends the job"
CHECK = """
x = np.ones(10)
hc.all_reduce(x)
assert x[0] == world.size
"""  # that the job goes on

# Processes of its own. If they touched MPI at their end, the job or its destroy would end.
FORK = """\
world = hc.init_process_group()
hc.all_reduce(np.ones(10))
pid = os.fork()
if pid == 0:
    {child}
assert os.waitpid(pid, 0)[1] == {status}
"""
CHILDREN = {
    "it ends by sys.exit(3)": ("sys.exit(3)", "3 << 8", ""),
    "it ends by os._exit(3)": ("os._exit(3)", "3 << 8", ""),
    "it returns from the program": ("return", "0", ""),
    "an exception in it": ("1 / 0", "1 << 8", "ZeroDivisionError"),
    "it calls an operation": ("hc.all_reduce(np.ones(3))", "1 << 8", "DistError: .* this one was forked from"),
}
PROCESSES = {
    "os.fork, and it is ended by SIGTERM": (
        """\
        world = hc.init_process_group()
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM
        """,
        "",
    ),
    "multiprocessing, fork": (
        """\
        import multiprocessing
        world = hc.init_process_group()
        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        child = fork.Process(target=divmod, args=(1, 0))
        child.start()
        child.join()
        assert child.exitcode == 1
        """,
        "ZeroDivisionError",
    ),
    "subprocess.run": (
        """\
        import subprocess
        world = hc.init_process_group()
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3
        """,
        "",
    ),
}

# Memory. A limit of the process needs no root; to the process a full file system looks the same.
OUT_OF_MEMORY = """\
import resource
world = hc.init_process_group()
x = np.ones((2400, 2400))[::2, ::2]
hc.all_reduce(np.ones(10))
if r == 1:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
hc.all_reduce(x)
"""
NO_SHARED_MEMORY = """\
import resource
world = hc.init_process_group()
hc.all_reduce(np.ones(10))
if r in {ranks}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
{then}
x = np.ones(10)
hc.all_reduce(x)
assert x[0] == world.size
world.destroy()
"""
SHARED_MEMORY = {
    "a persistent all_reduce": """\
x = np.ones(10)
with hc.all_reduce_init(x) as reduction:
    reduction.start()
    reduction.wait()
assert x[0] == world.size""",
    "a large all_reduce": """\
x = np.ones(2 << 20)
hc.all_reduce(x)
assert (x == world.size).all()""",
    "empty_shared": """\
try:
    hc.empty_shared(1000)
except MemoryError as error:
    print(f"MemoryError: {error}", file=sys.stderr)
else:
    raise AssertionError("this rank has an array")""",
}

THREADS = """\
world = hc.init_process_group()
groups = [{group} for _ in range(2)]
turns = [threading.Semaphore(1), threading.Semaphore(0)]
wrong = []

def work(me):
    for turn in range(100):
        x = np.full({size}, me + 1.0)
        {take}
        hc.all_reduce(x, group=groups[me])
        {give}
        if x[0] != (me + 1) * world.size:
            wrong.append((me, turn, x[0]))

threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, f"{{len(wrong)}} of 200 sums are wrong"
"""

# Ranks 0 and 1 have both windows; rank 0 has freed one before, so in its table they are the other way round.
WINDOWS = """\
world = hc.init_process_group()

def group_of(*ranks):
    group = hc.new_group(ranks)
    for _ in range(100 * (r in ranks)):
        hc.all_reduce(np.ones(5), group=group)
    return group

first = group_of(0, 2)
second = group_of(0, 1)
if r in (0, 2):
    first.destroy()
third = group_of(0, 1)
"""

# A thread of rank 0 waits forever in memory that MPI_Finalize takes away.
THREAD_WAITS = f"""\
{UNTIL_IN_MPI.replace("threading.main_thread().ident", "thread.ident")}
world = hc.init_process_group()
for _ in range(100):
    hc.all_reduce(np.ones(5))
if r == 0:
    thread = threading.Thread(target=hc.all_reduce, args=[np.ones(5)], daemon=True)
    thread.start()
    until_in_mpi()
"""

IN_FLIGHT = """\
world = hc.init_process_group()
group = hc.new_group()
arrays = [np.ones(n) for n in (10, 300_000, 10, 5_000_000)]
works = [hc.all_reduce(x, group=group, async_op=True) for x in arrays]
"""

HALVES = """\
world = hc.init_process_group()
n = world.size
def large(shape): return np.full(shape, 60_000, np.float16)
for size in (10, 1_000_000):
    x = large(size); hc.all_reduce(x); assert np.isinf(x).all()
    x = large(size); hc.all_reduce(x, async_op=True).wait(); assert np.isinf(x).all()
    x = large(size); hc.all_reduce(x, hc.ReduceOp.PREMUL_SUM(2)); assert np.isinf(x).all()
    x = large(size); hc.reduce(x, 0); assert np.isinf(x).all() == (r == 0)
    x = np.empty(size, np.float16); hc.reduce_scatter_single(x, large(n * size)); assert np.isinf(x).all()
    x = hc.empty_shared(size, np.float16); x[:] = 60_000; hc.all_reduce(x); assert np.isinf(x).all()
x = large(10)
with hc.all_reduce_init(x) as reduction:
    reduction.start(); reduction.wait()
assert np.isinf(x).all()
x = large(10)
with hc.coalescing():
    hc.all_reduce(x)
assert np.isinf(x).all()
buckets = hc.GradientBuckets([np.full(5, 1e30, np.float32)], compression=np.float16)
buckets.ready(0)
buckets.wait()
assert np.isinf(buckets.arrays[0]).all()
"""

INTERRUPTED = f"""\
{UNTIL_IN_MPI}
pressed = os.environ["HPCCOMM_DEBUG_DIR"] + "-pressed"
def press():
    until_in_mpi()
    os.kill(os.getpid(), signal.SIGINT)
    open(pressed, "w").close()
world = hc.init_process_group()
hc.all_reduce(np.ones(10))
if r == 1: threading.Thread(target=press).start()
while r == 0 and not ({{comes}} and os.path.exists(pressed)): time.sleep(0.01)
hc.all_reduce(np.ones(10))
hc.all_reduce(np.ones(10))
"""
MPIEXEC_INTERRUPTED = """\
world = hc.init_process_group()
hc.all_reduce(np.ones(10))
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
def is_timeout(pid): return open(f"/proc/{pid}/comm").read().strip() == "timeout"
if r == 1:
    pid = os.getpid()
    while not is_timeout(parent(pid)):
        pid = parent(pid)
    os.kill(pid, signal.SIGINT)
    time.sleep(600)
hc.all_reduce(np.ones(10))
"""

MANY = """\
from hpccomm.debug import start
def used():
    return int(open("/proc/self/statm").read().split()[1]) * 4 / 1024, len(os.listdir("/proc/self/fd"))
def settled(done):
    until = time.monotonic() + 60
    while not done() and time.monotonic() < until: time.sleep(0.01)
    return done()
world = hc.init_process_group()
x = np.zeros(4)
for turn in range({times}):
    if turn == {times} // 10:
        assert settled(lambda: start.current().reporter.mailbox.is_open)  # which the watchdog opens after a second
        mib, files = used()
    {step}
assert used()[0] < mib + 2, (mib, used())
assert settled(lambda: used()[1] <= files)  # the watchdog has more open for a moment
assert len(world.dispatcher.in_flight) == len(world.children) == 0
"""
GROUPS = """
    group = hc.new_group()
    x[:] = turn
    hc.all_reduce(x, group=group)
    assert x[0] == turn * world.size
    hc.destroy_process_group(group)"""
OPERATIONS = """
    x[:] = turn & 7
    if turn % 5:
        hc.all_reduce(x)
    else:
        hc.all_reduce(x, async_op=True).wait()
    assert x[3] == (turn & 7) * world.size"""

# Checkpoints: a folder that all ranks share, with two steps in it, and the check that the last one is whole.
CHECKPOINTS = """\
world = hc.init_process_group()
import pathlib, shutil, subprocess, tempfile
checkpoint = hc.checkpoint
folders = [tempfile.mkdtemp(dir="/dev/shm") if r == 0 else None]
hc.broadcast_object_list(folders)
folder = pathlib.Path(folders[0])
save = lambda step, **how: checkpoint.save(folder, {{"x": np.full(9, step)}}, step, **how)
save(100)
save(173)
try:
{body}
    found = checkpoint.load(folder)
    assert found.step == {last} and (found.arrays["x"] == {last}).all()
    hc.barrier()
finally:
    if r == 0: shutil.rmtree(folder)
"""
AFTER_PUBLISHING = """\
    replace = os.replace
    def renamed(old, new):
        replace(old, new)
        if str(new).endswith(".json"): raise OSError(5, "Input/output error")
    os.replace = renamed
    try:
        save(200, keep=1)
        assert False
    except checkpoint.CheckpointError as error:
        if r == 0: print("CheckpointError:", str(error).replace(str(folder), "checkpoints"), file=sys.stderr)
    os.replace = replace"""
FALL_BACK_THEN_SAVE = """\
    if r == 0:
        with open(next(folder.glob("step-0000000173-*")) / "rank-0.npy", "r+b") as file: file.truncate(99)
    hc.barrier()
    assert checkpoint.load(folder, fall_back=True).step == 100
    save(110)"""
TWO_WRITERS = """\
    if r == 0:
        hold = "import sys; from pathlib import Path; from hpccomm.checkpoint.writer import WriterLock; "
        hold += "lock = WriterLock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
        pipe = subprocess.PIPE
        other = subprocess.Popen([sys.executable, "-c", hold, folder], stdin=pipe, stdout=pipe)
        other.stdout.readline()
    try:
        save(200)
        assert False
    except checkpoint.CheckpointError as error:
        if r == 0: print("CheckpointError:", str(error).replace(str(folder), "checkpoints"), file=sys.stderr)
    if r == 0:
        other.kill()
        other.wait()
    save(210)"""


# Jobs that have one folder for their reports: files that one leaves there must not end another one.
REACHES_ITS_LIMIT = """\
world = hc.init_process_group()
if r == 1: time.sleep(600)
hc.all_reduce(np.ones(10))
"""
IN_ITS_OWN_FOLDER = "os.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
LONGER_THAN_A_LOOK = """\
world = hc.init_process_group(timeout=60)
from pathlib import Path
from hpccomm.debug.watchdog import FOLDER_PERIOD
def has_ended(): return any(Path(os.environ.get("HPCCOMM_DEBUG_DIR") or ".").glob("**/verdict.txt"))
until, ended = float("inf"), False
while True:
    go_on = np.array([time.monotonic() < until])
    hc.broadcast(go_on, src=0)
    if not go_on[0]: break
    if r == 0 and not ended and has_ended(): ended, until = True, time.monotonic() + FOLDER_PERIOD + 3
    time.sleep(0.01)
"""

# Surroundings of the watchdog when rank 1 does not come: it reports that in all of them.
MANY_FILES = """\
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [open(os.devnull) for _ in range(1100)]
"""
NO_DIRECTORY = """\
import tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
"""
FOLDER_IS_A_FILE = """\
import tempfile
tempfile.tempdir = os.path.dirname(os.path.abspath(__file__))
os.environ["HPCCOMM_DEBUG_DIR"] = __file__
"""
NAME = r"""\
code = compile("def late(): time.sleep(600)", os.fsdecode(b"caf\xe9.py"), "exec")
exec(code, globals())
"""
OWN_HANDLER = "if r == 1: signal.signal(signal.SIGUSR2, lambda *_: os._exit(75))\n"
COMES_LATE = """\
world = hc.init_process_group()
{then}
if r == 1: {late}
hc.all_reduce(np.ones(10))
"""

# Exceptions at a bad moment: rank 0 is interrupted twenty times before rank 1, which waits for its message, comes.
INTERRUPTS = """\
world = hc.init_process_group(timeout=60)
times = []
def waits():
    {waits}
def handler(_, frame):
    at = frame
    while at and at.f_code is not waits.__code__: at = at.f_back
    if not at: return  # the program's own code catches no exception there
    times.append(1)
    if len(times) <= 20: raise {error}
x = np.ones((1000, 2))[:, 0]
if r == 1: hc.recv(np.zeros(1), src=0)
work = hc.all_reduce(x, "avg", async_op=True)
if r == 0:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.005)
    while len(times) < 20:
        try: waits()
        except {error}: pass
        except hc.DistTimeoutError: pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    hc.send(np.zeros(1), dst=1)
work.wait()
assert (x == 1).all()
"""
ENDS_A_THREAD = """\
world = hc.init_process_group(timeout=60)
def leave():
    if threading.current_thread() is not threading.main_thread(): raise {error}
class Hook:
    def begin(self, operation): pass
    def end(self, operation): {hook}
world.register_hook(Hook())
for turn in range(3):
    future = hc.all_reduce(np.ones(10), async_op=True).get_future()
    future.add_done_callback(lambda _: {callback})
    future.wait(60)
"""
WARNED = """\
world = hc.init_process_group()
hc.isend(np.ones(3), (r + 1) % 3).wait()
hc.barrier()
try:
    world.destroy()
except RuntimeWarning as warning:
    print(warning, file=sys.stderr)
world = hc.init_process_group()
"""
QUICK_GROUPS = """\
world = hc.init_process_group()
until = time.monotonic() + 6  # twice the time limit
while MPI.COMM_WORLD.bcast(time.monotonic() < until):
    hc.new_group().destroy()
"""
WAITS_FOR_A_FUTURE = """\
world = hc.init_process_group()
if r == 1: time.sleep(600)
hc.all_reduce(np.ones(10), async_op=True).get_future().wait()
"""


def situations() -> Iterator[Case]:
    """Return every case."""

    def ok(fault: str, place: str, body: str, said: str = "", lost: str = NOTHING, **options: object) -> Case:
        options = {"timeout": PATIENT, **options}
        return Case(fault, place, body, said, status="ok", lost=lost, **options)  # type: ignore[arg-type]

    for what, (child, status, said) in CHILDREN.items():
        yield ok("another process", f"os.fork, {what}", FORK.format(child=child, status=status) + CHECK, said)
    for what, (body, said) in PROCESSES.items():
        yield ok("another process", what, f"{body}{CHECK.replace(chr(10), chr(10) + ' ' * 8)}", said)

    said = ENDS.format(name="MemoryError")
    yield Case("out of memory", "in the copy of a strided array", OUT_OF_MEMORY, said, timeout=PATIENT)
    for ranks, on in (("(0, 1, 2)", "on all ranks"), ("(0,)", "on rank 0"), ("(1,)", "on rank 1")):
        for place, then in SHARED_MEMORY.items():
            said = "MemoryError.*MemoryError.*MemoryError" if place == "empty_shared" else ""
            body = NO_SHARED_MEMORY.format(ranks=ranks, then=then)
            yield ok(f"no room in /dev/shm, {on}", f"in {place}", body, said)

    alone = {"take": "pass", "give": "pass", "size": "5"}
    yield ok("two threads", "each with a group", THREADS.format(group="hc.new_group()", **alone))
    turns = {"take": "turns[me].acquire()", "give": "turns[1 - me].release()", "size": "5 + 95 * me"}
    yield ok("two threads", "of one group, in turns", THREADS.format(group="world", **turns))
    racing = THREADS.format(group="world", take="pass", give="pass", size="5 + 95 * me")
    lost = "sums may be wrong without a word: MPI wants one order of collectives on all ranks"
    yield Case("two threads", "of one group, in any order", racing, "", status="any", lost=lost)

    yield ok(
        "destroy with work in flight",
        "",
        f"{IN_FLIGHT}group.destroy()\nassert all((x == world.size).all() for x in arrays)\n"
        f"assert all(work.is_success() for work in works){CHECK}",
    )
    receive = "work = hc.irecv(np.ones(3), src=(r + 1) % 3, group=group)\ngroup.destroy()"
    yield Case(
        "destroy with a receive in flight",
        "",
        f"world = hc.init_process_group()\ngroup = hc.new_group(timeout=1)\n{receive}",
        r"DistTimeoutError: destroy of .* recv #1: not done.*on rank \d ends the job",
    )
    yield ok("the end without destroy", "", f"world = hc.init_process_group(){CHECK}")
    yield ok("the end without destroy", "windows in another order on each rank", WINDOWS)
    yield ok("the end without destroy", "a thread waits in an all_reduce", THREAD_WAITS)
    yield ok("the end without destroy", "work in flight", IN_FLIGHT, lost="results that nobody waited for")

    yield ok("-W error, float16 overflows", "", HALVES, env={"PYTHONWARNINGS": "error"})
    for how, code in (("sys.stderr", "sys.stderr.close()"), ("descriptor 2", "os.close(2)")):
        body = f"world = hc.init_process_group()\nhc.all_reduce(np.ones(10))\n{code}\n"
        fault = "exception, and stderr is closed"
        yield Case(fault, how, f"{body}if r == 1: 1 / 0\nhc.all_reduce(np.ones(10))", "", lost="the job and its words")
        fault = "sleeps forever, and stderr is closed"
        yield Case(
            fault,
            how,
            f"{body}if r == 1: time.sleep(600)\nhc.all_reduce(np.ones(10))",
            "",
            lost="the job and its words",
        )

    for fault, code, last, said in (
        ("two writers", TWO_WRITERS, 210, r"CheckpointError: .*process \d+ on .* is saving to"),
        ("an I/O error just after publishing", AFTER_PUBLISHING, 200, "CheckpointError: .*Input/output error"),
        ("the last step is damaged: fall_back, then save", FALL_BACK_THEN_SAVE, 110, "loaded step 100 instead"),
    ):
        yield ok(fault, "in checkpoint.save", CHECKPOINTS.format(body=code, last=last), said)

    yield Case(
        "exception",
        "in a coalescing() block",
        "world = hc.init_process_group()\nwith hc.coalescing():\n    hc.all_reduce(np.ones(10))\n    if r == 1: 1 / 0",
        ENDS.format(name="ZeroDivisionError"),
    )
    yield Case(
        "exception",
        "between two GradientBuckets",
        """\
        world = hc.init_process_group()
        buckets = hc.GradientBuckets([np.ones(100), np.ones(100)], bucket_bytes=800)
        buckets.ready(1)
        if r == 1: 1 / 0
        buckets.ready(0)
        buckets.wait()
        """,
        ENDS.format(name="ZeroDivisionError"),
    )

    stuck = (
        r"\[rank 1\] Ctrl-C, inside MPI .*program\.py.*rank 1 is in all_reduce #2 of 'world' .*; Ctrl-C ends the job"
    )
    yield Case(
        "SIGINT to a rank", "in a collective that never ends", INTERRUPTED.format(comes=False), stuck, timeout=PATIENT
    )
    yield Case(
        "SIGINT to a rank",
        "in a collective that ends at once",
        INTERRUPTED.format(comes=True),
        "KeyboardInterrupt.*hpccomm: Ctrl-C ends the job",
        timeout=PATIENT,
    )
    yield Case("SIGINT to mpiexec (Ctrl-C)", "in a collective", MPIEXEC_INTERRUPTED, "")

    for step, what, quick in ((GROUPS, "groups made and destroyed", 1000), (OPERATIONS, "operations", 100_000)):
        for times in (quick, 10 * quick):
            body = MANY.format(times=times, step=step)
            is_slow = times > quick
            yield ok(f"{times:,} {what}", "", body, ranks=2, is_busy=True, is_slow=is_slow)

    one = {"other": REACHES_ITS_LIMIT, "ranks": 2, "timeout": TIMEOUT}
    fault, long = "a job in the same folder for reports", LONGER_THAN_A_LOOK
    yield ok(fault, "after one that has reached its time limit", long + CHECK, **one)
    yield ok(fault, "beside one that reaches its time limit", long + CHECK, "rank 1 never", is_beside=True, **one)
    one["other"] = IN_ITS_OWN_FOLDER + REACHES_ITS_LIMIT
    again = {"HPCCOMM_DEBUG_DIR": "", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    yield ok(fault, "requeued by Slurm after status 124", IN_ITS_OWN_FOLDER + long + CHECK, env=again, **one)

    late, names = (
        r"rank 1 never reached all_reduce #1 of 'world'.*: it is in the program at .*",
        "sleeps forever, and ",
    )
    sleeps = COMES_LATE.format(then="", late="time.sleep(600)")
    for what, body in (
        ("1,100 files are open", MANY_FILES + sleeps),
        (
            "the working directory is removed",
            NO_DIRECTORY + COMES_LATE.format(then="os.rmdir(folder)", late="time.sleep(600)"),
        ),
        ("its file's name is not UTF-8", NAME + COMES_LATE.format(then="", late="late()")),
        ("HPCCOMM_WATCHDOG=0 on it alone", 'if r == 1: os.environ["HPCCOMM_WATCHDOG"] = "0"\n' + sleeps),
        ("it handles SIGUSR2 itself", OWN_HANDLER + sleeps),
        ("HPCCOMM_DEBUG_DIR is a file", FOLDER_IS_A_FILE + sleeps),
    ):
        yield Case(names + what, "", body, late)
    body = f"{NO_DIRECTORY}if r == 1: os.rmdir(folder)\nworld = hc.init_process_group()\nos.chdir('/'){CHECK}"
    yield ok("the working directory is removed before init", "on one rank", body, env={"HPCCOMM_DEBUG_DIR": ""})

    polls = "while not work.is_completed(): pass"
    for error, waits, where in (
        ("TimeoutError", "work.wait(0.02)", "Work.wait"),
        ("KeyboardInterrupt", polls, "a poll"),
    ):
        body = INTERRUPTS.format(error=error, waits=waits) + CHECK
        yield ok(f"a signal's handler raises {error}", f"in {where}", body)
    for error in ("SystemExit", "KeyboardInterrupt"):
        for where, how in (
            ("callback", {"callback": "leave()", "hook": "pass"}),
            ("hook", {"callback": 0, "hook": "leave()"}),
        ):
            body = ENDS_A_THREAD.format(error=error, **how) + CHECK
            yield ok(f"{error} in the progress thread", f"in a {where}", body, rf"a {where}.* raised.*{error}")
    said = "1 message was sent to this rank and never received"
    yield ok("-W error, a message that nobody receives", "", WARNED + CHECK, said, env={"PYTHONWARNINGS": "error"})
    yield ok("quick groups, for longer than the time limit", "", QUICK_GROUPS + CHECK, timeout=TIMEOUT)
    yield Case("sleeps forever", "and the others wait for a Future", WAITS_FOR_A_FUTURE, late)

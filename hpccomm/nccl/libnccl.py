"""NCCL by ctypes: all functions; other bindings use those that they lack, above all for non-blocking communicators.

Calls through CuPy and nccl4py cost less, so these are preferred. A call of a non-blocking communicator may return
ncclInProgress: NCCL continues in a thread, one for each call since 2.23 (ncclGroupEndInternal in its src/group.cc), and
is polled until the call is done.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import Any, NoReturn

from ..cuda.time_limit import TimeLimit
from ..errors import DistBackendError, on_rank
from . import find

SUCCESS, IN_PROGRESS = 0, 7
UNIQUE_ID_BYTES = 128
UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT
MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
STILL_WRITTEN: list[c_void_p] = []  # pointers that NCCL may still set: the call did not end in time

# nccl.h's ncclResult_t. CuPy's own table lacks the last ones.
RESULTS = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
    8: "ncclTimeout",
}


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18; a newer NCCL uses its defaults for later fields."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
    )

    def __init__(self, blocking: bool) -> None:
        super().__init__(
            ctypes.sizeof(Config), MAGIC, 21800, blocking, UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED
        )


class CollConfig(ctypes.Structure):
    """ncclCollConfig_t as of NCCL 2.31; a newer NCCL uses its defaults for later fields."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("ext", c_void_p),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("nvls_ctas", c_int),
        ("cga_cluster_size", c_int),
        ("alg_selection", c_char_p),
        ("force_alg_selection", c_int),
        ("cta_policy", c_int),
        ("user_profiler_tag", c_uint64),
    )

    def __init__(self, **settings: Any) -> None:
        undefined = (None, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, None, True, UNDEFINED, 0)
        super().__init__(ctypes.sizeof(CollConfig), MAGIC, 23100, *undefined)
        for name, value in settings.items():
            setattr(self, name, value)


COMM, STREAM, BUFFER = c_void_p, c_void_p, c_void_p
COUNT, TYPE, OP, RANK = c_size_t, c_int, c_int, c_int
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclAllReduce": (BUFFER, BUFFER, COUNT, TYPE, OP, COMM, STREAM),
    "ncclReduce": (BUFFER, BUFFER, COUNT, TYPE, OP, RANK, COMM, STREAM),
    "ncclBroadcast": (BUFFER, BUFFER, COUNT, TYPE, RANK, COMM, STREAM),
    "ncclReduceScatter": (BUFFER, BUFFER, COUNT, TYPE, OP, COMM, STREAM),
    "ncclAllGather": (BUFFER, BUFFER, COUNT, TYPE, COMM, STREAM),
    "ncclAlltoAll": (BUFFER, BUFFER, COUNT, TYPE, COMM, STREAM),  # since 2.28
    "ncclSend": (BUFFER, COUNT, TYPE, RANK, COMM, STREAM),
    "ncclRecv": (BUFFER, COUNT, TYPE, RANK, COMM, STREAM),
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (POINTER(COMM), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommSplit": (COMM, c_int, c_int, POINTER(COMM), POINTER(Config)),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),  # since 2.19
    "ncclMemFree": (BUFFER,),
    "ncclCommWindowRegister": (COMM, BUFFER, c_size_t, POINTER(c_void_p), c_int),  # since 2.27
    "ncclCommWindowDeregister": (COMM, c_void_p),
    "ncclCommGetAsyncError": (COMM, POINTER(c_int)),
    "ncclCommFinalize": (COMM,),
    "ncclCommDestroy": (COMM,),
    "ncclCommAbort": (COMM,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
COLLECTIVES = {
    "all_reduce": "ncclAllReduce",
    "reduce": "ncclReduce",
    "broadcast": "ncclBroadcast",
    "reduce_scatter": "ncclReduceScatter",
    "all_gather": "ncclAllGather",
    "all_to_all": "ncclAlltoAll",
}
OPERATIONS = COLLECTIVES | {"send": "ncclSend", "recv": "ncclRecv"}
FUNCTIONS |= {f"{name}Config": (*FUNCTIONS[name], POINTER(CollConfig)) for name in COLLECTIVES.values()}  # since 2.31


class NCCLError(Exception):
    """An error that a function of libnccl has returned."""

    def __init__(self, code: int) -> None:
        super().__init__(RESULTS.get(code, f"ncclResult_t {code}"))
        self.code = code


def check(code: int) -> None:
    """Raise the error of a result code."""
    if code != SUCCESS:
        raise NCCLError(code)


class Library(dict[str, Callable[..., int]]):
    """The functions of a libnccl by name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in FUNCTIONS.items():
            if hasattr(library, name):
                function = library[name]  # a new object: no other code sets its types
                function.argtypes, function.restype = types, c_int
                self[name] = function
        self._last_error = library["ncclGetLastError"]
        self._last_error.argtypes, self._last_error.restype = [c_void_p], c_char_p

    def __missing__(self, name: str) -> NoReturn:
        raise DistBackendError(f"this version of NCCL does not have {name}; install a newer one{on_rank()}")

    def last_error(self) -> str:
        """Return the text of the last error in this process (the function's argument is unused)."""
        return (self._last_error(None) or b"").decode(errors="replace").strip()

    def explain(self, code: int) -> str:
        """Return the name of a result code, and the text of the last error."""
        last = self.last_error()
        return f"{RESULTS.get(code, 'ncclResult_t')} ({code}){': ' if last else ''}{last}"


class NCCL:
    """The NCCL half of a provider, without other bindings; those for CuPy and nccl4py override parts of it."""

    bindings = "ctypes"

    def __init__(self) -> None:
        # Operations of several groups may be in flight at once, each on its own stream. With this setting, NCCL 2.26
        # and newer launches them in the order of the calls; otherwise they might wait for each other forever.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        self.library = Library(self.load())
        self.has_all_to_all = "ncclAlltoAll" in self.library

    def load(self) -> ctypes.CDLL:
        """Return the libnccl that this provider calls."""
        return find.load()

    def version(self) -> int:
        version = c_int()
        check(self.library["ncclGetVersion"](version))
        return version.value

    def unique_id(self) -> bytes:
        unique_id = UniqueId()
        check(self.library["ncclGetUniqueId"](unique_id))
        return bytes(unique_id)

    def connect(self, size: int, unique_id: bytes, rank: int, time_limit: TimeLimit | None) -> Communicator:
        comm, own_id = COMM(), UniqueId()
        ctypes.memmove(ctypes.byref(own_id), unique_id, UNIQUE_ID_BYTES)
        config = Config(blocking=time_limit is None)
        code = self.library["ncclCommInitRankConfig"](comm, size, own_id, rank, config)
        if time_limit is None:
            check(code)
            return self.blocking(comm)
        connected = Communicator(self.library, comm, time_limit)
        try:
            connected.finish(code)
        except Exception:
            if comm:
                connected.abort()
            raise
        return connected

    def allocate(self, nbytes: int) -> int:
        memory = c_void_p()
        check(self.library["ncclMemAlloc"](memory, nbytes))
        return memory.value or 0

    def free(self, memory: int) -> None:
        check(self.library["ncclMemFree"](memory))

    def functions_for_c(self) -> dict[str, int]:
        functions: dict[str, Any] = self.library
        return {name: ctypes.cast(function, c_void_p).value or 0 for name, function in functions.items()}

    def error(self, code: int) -> Exception:
        return NCCLError(code)

    def blocking(self, comm: c_void_p) -> Communicator:
        """Return a Communicator for an existing blocking communicator."""
        return Communicator(self.library, comm, time_limit=None)

    def result_code(self, error: Exception) -> int | None:
        """Return the result code of an NCCL error; None for any other error."""
        return error.code if isinstance(error, NCCLError) else None

    def explain(self, error: Exception) -> str | None:
        code = self.result_code(error)
        return None if code is None else self.library.explain(code)


class Communicator:
    """A non-blocking ncclComm_t, whose calls wait here for `time_limit`; with None, a blocking one."""

    def __init__(self, library: Library, comm: c_void_p, time_limit: TimeLimit | None) -> None:
        self._library = library
        self._comm = comm
        self._time_limit = time_limit
        for name, function in OPERATIONS.items():
            setattr(self, name, partial(self._operate, function, ()))
        self.group_start = lambda: self.finish(library["ncclGroupStart"]())
        self.group_end = lambda: self.finish(library["ncclGroupEnd"]())

    def configured(self, settings: Mapping[str, Any]) -> Communicator:
        _ = self._library["ncclAllReduceConfig"]  # raises if this NCCL is too old
        made, config = Communicator(self._library, self._comm, self._time_limit), CollConfig(**settings)
        for name, function in COLLECTIVES.items():
            setattr(made, name, partial(made._operate, f"{function}Config", (config,)))
        return made

    def _operate(self, function: str, config: tuple[CollConfig, ...], *arguments: int) -> None:
        *others, stream = arguments
        self.finish(self._library[function](*others, self._comm, stream, *config))

    def finish(self, code: int) -> None:
        """Wait for the end of the call that returned `code`; raise its error."""
        if code == IN_PROGRESS and self._time_limit is not None:
            self._time_limit.wait_while(lambda: self._state() == IN_PROGRESS)
            code = self._state()
        check(code)

    def _state(self) -> int:
        state = c_int()
        return self._library["ncclCommGetAsyncError"](self._comm, state) or state.value

    @property
    def handle(self) -> int:
        """The address of the ncclComm_t."""
        return self._comm.value or 0

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Communicator | None:
        made, config = COMM(), Config(blocking=time_limit is None)
        code = self._library["ncclCommSplit"](self._comm, color, key, made, config)
        self._finish_later(code, made, is_set=color >= 0)
        return Communicator(self._library, made, time_limit) if made else None

    def register_window(self, memory: int, nbytes: int) -> int:
        window = c_void_p()
        code = self._library["ncclCommWindowRegister"](self._comm, memory, nbytes, window, SYMMETRIC)
        self._finish_later(code, window, is_set=False)  # it stays NULL without symmetric memory
        return window.value or 0

    def deregister_window(self, window: int) -> None:
        self.finish(self._library["ncclCommWindowDeregister"](self._comm, window))

    def _finish_later(self, code: int, made: c_void_p, is_set: bool) -> None:
        """Wait for the end of a call that returns ncclSuccess at once, and whose thread sets `made`.

        ncclCommSplit and ncclCommWindowRegister do this (src/init.cc and src/dev_runtime.cc of NCCL 2.28 to 2.30).
        """

        def is_in_progress() -> bool:
            state = self._state()
            return state == IN_PROGRESS or (state == SUCCESS and is_set and not made)

        try:
            if code == SUCCESS and self._time_limit is not None:
                self._time_limit.wait_while(is_in_progress)
                code = self._state()
            self.finish(code)
        except Exception:
            STILL_WRITTEN.append(made)
            raise

    def async_error(self) -> str | None:
        state = self._state()
        return None if state in (SUCCESS, IN_PROGRESS) else self._library.explain(state)

    def abort(self) -> None:
        self._library["ncclCommAbort"](self._comm)

    def destroy(self) -> None:
        self.finish(self._library["ncclCommFinalize"](self._comm))  # waits for operations in flight on all ranks
        self.finish(self._library["ncclCommDestroy"](self._comm))

"""Arrays of all libraries: find an array's device, and make the view that its backend gets."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ..errors import on_rank
from ..native import fastpath
from .late import GPU_RUNTIME, late

Array: TypeAlias = Any
"""A NumPy array, or anything with the buffer protocol, DLPack or the CUDA array interface."""

BUILT_IN_DEVICES = ("cpu", "cuda", "rocm")

# DLDeviceType (dlpack.h): pinned memory belongs to the host, managed memory to the GPU.
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 11: "cpu", 13: "cuda"}
# DLDataTypeCode of each kind of values, by NumPy's letter, and NumPy's sizes in bytes
_DLPACK_KINDS = {"i": (0, (1, 2, 4, 8)), "u": (1, (1, 2, 4, 8)), "f": (2, (2, 4, 8)), "c": (5, (8, 16)), "b": (6, (1,))}
_BFLOAT = 4

_INSTEAD = "for a number: hpccomm.all_reduced(x), or x = np.array(x); for other Python objects: the *_object functions"
# Attributes of ndarray subclasses (astropy's Masked and Quantity, unyt's arrays) that give the numbers their meaning
# but would not be sent, each with advice for the error message.
_NUMBERS = "communicate numpy.asarray(array), a view of its numbers, in one unit on all ranks"
_BESIDE_THE_BUFFER = {
    "mask": "communicate its data and its mask as plain arrays",
    "unit": _NUMBERS,
    "units": _NUMBERS,
}
_PLACES_OF_MPI4PY = ("InPlaceType", "BottomType")
_predicates: dict[str, Callable[[object], bool]] = {}
# The devices of CuPy's array types, and "" for PyTorch's, whose tensors can be on any; filled only while no predicate
# is registered. The fast paths read it too.
device_of_type: dict[type, str] = {}


def register_device(name: str, predicate: Callable[[object], bool]) -> None:
    """Add a device: arrays for which `predicate(array)` is true live on `name`.

    Backend configurations can then use the name (``"cpu:mpi,fpga:mine"``). Predicates are
    called before any built-in rule, for every array that is not a plain ``numpy.ndarray``, so they
    should be fast and must not raise.

    Parameters
    ----------
    name : str
        The name of the device in configurations: letters, digits and "_".
    predicate : callable
        A function of one array; true if the device holds it.

    Returns
    -------
    None

    Raises
    ------
    ValueError
        The name is built in, already registered, or not a plain word.
    TypeError
        `predicate` is not callable.

    Examples
    --------
    >>> hc.register_device("fpga", lambda array: hasattr(array, "fpga_address"))
    >>> class Field:  # an array type of another library
    ...     fpga_address = 0x1000
    >>> hc.device_of(Field())
    'fpga'
    """
    name = name.strip().lower()
    if not name.isidentifier():
        raise ValueError(f"register_device: {name!r} is not a device name; use letters, digits and '_'")
    if name in known_devices():
        raise ValueError(f"register_device: {name!r} exists already; the devices are {', '.join(known_devices())}")
    if not callable(predicate):
        raise TypeError(f"register_device: predicate is {predicate!r}; expected a function of one array")
    _predicates[name] = predicate
    device_of_type.clear()


def known_devices() -> tuple[str, ...]:
    """Return the device names for configurations: the built-in ones, then the registered ones."""
    return (*BUILT_IN_DEVICES, *_predicates)


def device_of(array: object) -> str:
    """Return the name of the device that holds `array`.

    Parameters
    ----------
    array : array
        Any array that an operation takes.

    Returns
    -------
    str
        ``"cpu"``, ``"cuda"``, ``"rocm"``, or a name given to :func:`register_device`.

    Raises
    ------
    TypeError
        `array` is not an array.

    Examples
    --------
    >>> hc.device_of(np.ones(2))
    'cpu'
    """
    return locate("device_of", "array", array)[0]


def locate(operation: str, argument: str, array: Array) -> tuple[str, Any]:
    """Return the device of `array`, and the array for the backend: in host memory a NumPy view."""
    if type(array) is np.ndarray:
        return "cpu", array
    device = device_of_type.get(type(array))
    if device:
        return device, array
    for name, predicate in _predicates.items():
        if predicate(array):
            return name, array
    module = module_of(array)
    if module is not np:
        device = _device_of_cupy(module)
        if not _predicates:
            device_of_type[type(array)] = device
        return device, array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{operation}: {argument} is a masked array, and the mask would be lost; "
            f"communicate {argument}.data and {argument}.mask{on_rank()}"
        )
    if isinstance(array, np.ndarray):
        for name, instead in _BESIDE_THE_BUFFER.items():
            if hasattr(type(array), name):  # not hasattr(array): a field of np.recarray may have the name
                raise TypeError(
                    f"{operation}: {argument} is {_a(array)}, and its {name} would be lost; {instead}{on_rank()}"
                )
        return "cpu", array.view(np.ndarray)
    # A NumPy scalar's buffer is a copy, so a result would be lost in it. MPI.IN_PLACE has an empty buffer.
    if not isinstance(array, np.generic) and type(array).__name__ not in _PLACES_OF_MPI4PY:
        if hasattr(array, "__dlpack_device__"):
            try:
                device = _DLPACK_DEVICES.get(int(array.__dlpack_device__()[0]))
                if device is not None:
                    return device, _host_view(array) if device == "cpu" else _gpu_view(array)
            except Exception as error:  # the other library may raise anything
                reason = str(error).partition("\n")[0]
                raise TypeError(
                    f"{operation}: {argument} is {_a(array)} that NumPy can't view without a copy: {reason}; make a "
                    f"contiguous array of an ordinary dtype of it first{on_rank()}"
                ) from error
        if hasattr(array, "__cuda_array_interface__"):
            return "cuda", _gpu_view(array)
        try:
            return "cpu", np.asarray(memoryview(array))
        except (TypeError, ValueError):
            pass
    raise TypeError(
        f"{operation}: {argument} is {_a(array)}; expected a NumPy or CuPy array, or another object with the "
        f"buffer protocol or DLPack ({instead_of_mpi4pys(array) or _INSTEAD}){on_rank()}"
    )


def instead_of_mpi4pys(thing: object) -> str:
    """Return a hint for replacing an argument of mpi4py's; "" for any other argument."""
    if isinstance(thing, list | tuple) and thing and type(thing[-1]).__module__ == "mpi4py.MPI":
        return "without count and MPI datatype: the array, or array[:n]"
    if type(thing).__module__ != "mpi4py.MPI":
        return ""
    if type(thing).__name__ in ("Op", "InPlaceType"):
        return "reductions are in place: all_reduce(array, op)"
    return "new_group(comm=...) makes one" if hasattr(thing, "Get_rank") else ""


def is_sparse(array: object) -> bool:
    """Return True if `array` is a sparse matrix or array of scipy or cupyx, without importing them."""
    if type(array) in device_of_type:
        return False
    modules = map(sys.modules.get, ("scipy.sparse", "cupyx.scipy.sparse"))
    return any(module is not None and module.issparse(array) for module in modules)


def module_of(array: Array) -> Any:
    """Return the module whose functions work on `array`: CuPy for its arrays, NumPy for all others."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())) else np


def count_of(array: Array) -> int:
    """Return the number of elements; of a sparse matrix, the stored ones."""
    return int(array.numel() if callable(array.size) else array.size)  # the size of a torch.Tensor is a method


def is_read_only(array: Any) -> bool:
    """Return True if a GPU array is read-only, like JAX's; CuPy's arrays never are."""
    if type(array) in device_of_type or module_of(array) is not np:
        return False
    interface = getattr(array, "__cuda_array_interface__", None)
    return bool(interface and interface.get("data", (0, False))[1])


@functools.cache
def _device_of_cupy(cupy: Any) -> str:
    return "rocm" if cupy.cuda.runtime.is_hip else "cuda"


def _gpu_view(array: Any) -> Any:
    """Return a CuPy view of another library's GPU array; the array itself if CuPy can't view it.

    The program's own backends may support arrays that CuPy can't view; hpccomm's backends raise an error for them.
    """
    if not _predicates and type(array) in look_at_tensors(sys.modules.get("torch")):
        device_of_type[type(array)] = ""
    try:
        return late(GPU_RUNTIME)().as_array(array)
    except Exception:
        return array


def why_no_gpu_view(array: Any) -> str:
    """Return the reason why CuPy can't view an array."""
    try:
        late(GPU_RUNTIME)().as_array(array)
    except Exception as error:
        return str(error) or repr(error)
    return "a second time it can"


def bits_of_torch(tensor: Any) -> tuple[Any, Any]:
    """Return a tensor that other libraries can view, and the dtype for that view (None: the tensor's own).

    NumPy and CuPy have no bfloat16 or float8: such tensors are returned as integers of equal size, with ml_dtypes'
    dtype. Communication is not differentiated, as in torch.distributed.
    """
    tensor = tensor.detach()
    if tensor.dtype.itemsize > 2 or not tensor.dtype.is_floating_point:
        return tensor, None
    name = str(tensor.dtype).removeprefix("torch.")
    if not name.startswith(("bfloat16", "float8")):
        return tensor, None
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{name} needs ml_dtypes: pip install ml_dtypes") from None

    torch = sys.modules["torch"]
    return tensor.view(torch.int16 if name == "bfloat16" else torch.uint8), np.dtype(getattr(ml_dtypes, name))


@functools.cache
def look_at_tensors(torch: Any) -> tuple[type, ...]:
    """Let the compiled extension look at PyTorch's tensors, and return their types; () if one of both can't."""
    if fastpath is None or torch is None:
        return ()
    dtypes = (np.dtype(f"{kind}{size}") for kind, (_, sizes) in _DLPACK_KINDS.items() for size in sizes)
    numbers = {(dlpack_code(dtype), 8 * dtype.itemsize): dtype.num for dtype in dtypes}
    try:
        types = torch.Tensor, torch.nn.Parameter
        fastpath.set_up_tensors(types, numbers)
    except (AttributeError, ValueError, ImportError):  # it is being imported, or has not these functions
        return ()
    return types


def dlpack_code(dtype: Any) -> int:
    """Return DLPack's code (DLDataTypeCode) of the kind of a dtype's values; -1 for kinds that NCCL has not."""
    return _BFLOAT if dtype.name == "bfloat16" else _DLPACK_KINDS.get(dtype.kind, (-1,))[0]


def _host_view(array: Any) -> Any:
    """Return a NumPy view of another library's host array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        bits, dtype = bits_of_torch(array)
        # tensor.numpy() makes the storage unresizable; DLPack ignores is_neg, for which numpy() raises an error.
        view = None if bits.is_neg() else np.from_dlpack(bits)
        if view is None or not view.flags.writeable:  # NumPy 1's is read-only
            view = bits.numpy()
        return view if dtype is None else view.view(dtype)
    return np.from_dlpack(array)


def _a(array: object) -> str:
    name = type(array).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"

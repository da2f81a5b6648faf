"""DLPack's functions in C (dlpack.h, DLPackExchangeAPI): those of a class of the tests, and PyTorch's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

NAME = b"dlpack_exchange_api"


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


LOOK_AT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
CURRENT_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Functions(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("look_at", LOOK_AT),
        ("current_stream", CURRENT_STREAM),
    )


def functions_of(kind: Any) -> Functions:
    """Return the functions of a class."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return Functions.from_address(pointer(kind.__dlpack_c_exchange_api__, NAME))


def capsule(look_at: Callable[..., int], current_stream: Callable[..., int]) -> tuple[Any, Functions]:
    """Return the attribute `__dlpack_c_exchange_api__` of a class, and the functions, which must live as long."""
    made = Functions(1, 3, look_at=LOOK_AT(look_at), current_stream=CURRENT_STREAM(current_stream))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(made), NAME, None), made

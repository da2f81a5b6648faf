"""Key-value stores that processes use to find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.late import attributes

if TYPE_CHECKING:
    from .file_store import FileStore
    from .hash_store import HashStore
    from .store import PrefixStore, Store
    from .table import QueueEmptyError
    from .tcp_store import TCPStore

LATER = {  # as in hpccomm/__init__.py
    "FileStore": "file_store",
    "HashStore": "hash_store",
    "PrefixStore": "store",
    "QueueEmptyError": "table",
    "Store": "store",
    "TCPStore": "tcp_store",
}

__all__ = ["FileStore", "HashStore", "PrefixStore", "QueueEmptyError", "Store", "TCPStore"]


if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, LATER)

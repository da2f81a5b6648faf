"""Key-value stores, through which processes find each other."""

from .file_store import FileStore
from .hash_store import HashStore
from .store import PrefixStore, Store
from .table import QueueEmptyError
from .tcp_store import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "QueueEmptyError", "Store", "TCPStore"]

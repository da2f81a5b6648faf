"""The folder in which the ranks of a run exchange files; no other run and no other user writes there.

Each run has its own, ``HPCCOMM_DEBUG_DIR/run-...``. A rank that can't create it uses one in the directory for
temporary files; all ranks look into both.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONGEST = 1 << 28  # bytes; larger files are not read


class Folder:
    """The folder of a run."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        fallback = Path(tempfile.gettempdir()) / f"{path.parent.name or 'hpccomm-debug'}-{os.geteuid()}"
        self.places = [path, fallback / path.name]  # possible paths; this process writes to the first
        self._fallback = fallback

    def put(self, name: str, text: str) -> Path:
        """Write a file atomically, replacing an older one, and return its path."""
        with self._opened() as folder:
            _replace(folder, name, text)
        return self.places[0] / name

    def create(self, name: str) -> bool:
        """Create an empty file; return False if the name exists already."""
        with self._opened() as folder:
            try:
                os.close(_new(folder, name))
            except FileExistsError:
                return False
        return True

    def now(self) -> float:
        """Return the time of the file server's clock, which may differ from this node's."""
        with self._opened() as folder:
            name = f".now.{secrets.token_hex(4)}"
            os.close(_new(folder, name))
            try:
                return os.stat(name, dir_fd=folder).st_mtime
            finally:
                os.unlink(name, dir_fd=folder)

    def text(self, name: str) -> str:
        """Return the text of a file; "" if there is none."""
        return next(filter(None, (read_text(place / name) for place in self.places)), "")

    def files(self, pattern: str) -> list[Path]:
        """Return the files whose names match, from all places."""
        return [file for place in self.places for file in sorted(place.glob(pattern))]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            folder = own(self.places[0])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(own(self._fallback))
            try:
                folder = own(self.places[1])
            except OSError:
                raise error from None
            self.places.reverse()
        try:
            yield folder
        finally:
            os.close(folder)


def own(path: Path) -> int:
    """Return a descriptor of a folder that only this user can write into; create a missing folder.

    Raise OSError if that is impossible: ranks would obey questions in another user's folder.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(folder)
        raise PermissionError(f"{path} is another user's, or others can write into it: name another HPCCOMM_DEBUG_DIR")
    return folder


def put(folder: Path, name: str, text: str) -> Path:
    """Replace a file like `Folder.put`, in a folder of any owner."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _replace(opened, name, text)
    finally:
        os.close(opened)
    return folder / name


def _new(folder: int, name: str) -> int:
    """Create a new file without following links, and return its descriptor."""
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600, dir_fd=folder)


def _replace(folder: int, name: str, text: str) -> None:
    """Write the file under an unpredictable name, then rename it."""
    part = f".{name}.{secrets.token_hex(8)}"
    file = _new(folder, part)
    try:
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def read_text(file: Path, is_an_order: bool = False) -> str:
    """Return the text of a regular file, "" for a link or no file; an order must be from this user or root."""
    with contextlib.suppress(OSError):
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, encoding="utf-8", errors="replace") as text:
            found = os.fstat(opened)
            is_trusted = not is_an_order or found.st_uid in (os.geteuid(), 0)
            if stat.S_ISREG(found.st_mode) and is_trusted and found.st_size <= LONGEST:
                return text.read()
    return ""


def runs(folder: Path, pattern: str) -> list[Path]:
    """Return the run folders with files of a pattern, the newest last: `folder` itself, or those in it."""
    found: dict[Path, float] = {}
    for file in (*folder.glob(pattern), *folder.glob(f"run-*/{pattern}")):
        with contextlib.suppress(OSError):
            found[file.parent] = max(file.lstat().st_mtime, found.get(file.parent, 0.0))
    return sorted(found, key=found.__getitem__)

"""The parser of torch.distributed's `init_method`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit


class Method(NamedTuple):
    """A parsed init_method; `where` is an address (host, port), a path, or None if hpccomm chooses."""

    where: tuple[str, int] | str | None = None
    rank: int = -1
    world_size: int = -1


def parsed(init_method: str, environ: Mapping[str, str] = os.environ) -> Method:
    """Return the parsed `init_method`; raise ValueError if torch.distributed has no such form."""
    url = urlsplit(init_method)
    said = dict(parse_qsl(url.query))
    try:
        if url.scheme == "env":
            said = {"rank": environ.get("RANK", ""), "world_size": environ.get("WORLD_SIZE", "")}
            host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
            where: tuple[str, int] | str | None = (host, int(port)) if host and port else None
        elif url.scheme == "tcp" and url.hostname and url.port:
            where = url.hostname, url.port
        elif url.scheme == "file" and url.path and not url.netloc:
            where = unquote(url.path)
        else:
            raise ValueError
        return Method(where, int(said.get("rank") or -1), int(said.get("world_size") or -1))
    except ValueError:
        raise ValueError(
            f"init_process_group: init_method is {init_method!r}; expected 'env://' (with numbers in MASTER_PORT, RANK "
            f"and WORLD_SIZE where they are set), 'tcp://host:port' or 'file:///path'; or leave it out, MPI knows"
        ) from None

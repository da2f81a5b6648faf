"""The exchange of parts of arrays, as a transport does it that has nothing better: a message for each part."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .backend import Pieces
from .overlap import all_unaliased
from .work import JoinedWork, Once, Work

if TYPE_CHECKING:
    from .backend import Backend


def by_messages(backend: Backend, sends: Pieces, receives: Pieces, adds: bool) -> Work | None:
    """Do `Backend.exchange` by the sends and receives of a backend."""
    into = [(peer, np.empty_like(piece) if adds else piece) for peer, piece in receives]
    sent = all_unaliased([piece for _, piece in sends], [piece for _, piece in receives])
    sends = [(peer, piece) for (peer, _), piece in zip(sends, sent)]
    works = []
    with backend.batch([piece for _, piece in (*into, *sends)]):
        for peer, piece in into:
            works.append(backend.recv(piece, peer, backend.exchange_tag, True))
        for peer, piece in sends:
            works.append(backend.send(piece, peer, backend.exchange_tag, True))
    joined = JoinedWork([work for work in works if isinstance(work, Work)])
    if adds:
        joined.finish_with(Once(*(partial(np.add, own, got, own) for (_, own), (_, got) in zip(receives, into))))
    return joined

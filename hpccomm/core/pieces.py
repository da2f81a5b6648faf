"""The exchange of parts of arrays, as a transport does it that has nothing better: a message for each part."""

from __future__ import annotations

from functools import partial
from operator import setitem
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import Pieces
from .overlap import all_unaliased
from .work import JoinedWork, Once, Work

if TYPE_CHECKING:
    from .backend import Backend


def by_messages(backend: Backend, sends: Pieces, receives: Pieces, adds: bool) -> Work | None:
    """Do `Backend.exchange` by the sends and receives of a backend; what a rank sends to itself is copied."""
    me, tag = backend.rank, backend.exchange_tag
    unaliased = all_unaliased([piece for _, piece in sends], [piece for _, piece in receives])
    sent = [(peer, piece) for (peer, _), piece in zip(sends, unaliased)]
    own = iter([piece for peer, piece in sent if peer == me])
    came: list[Any] = [next(own) if peer == me else np.empty_like(piece) if adds else piece for peer, piece in receives]
    pairs = [(peer, piece, each) for (peer, piece), each in zip(receives, came)]
    with backend.batch([each for peer, each in [*zip((peer for peer, _ in receives), came), *sent] if peer != me]):
        works = [backend.recv(each, peer, tag, True) for peer, _, each in pairs if peer != me]
        works += [backend.send(piece, peer, tag, True) for peer, piece in sent if peer != me]
    joined = JoinedWork([work for work in works if isinstance(work, Work)])
    if adds:
        joined.finish_with(Once(*(partial(np.add, piece, each, piece) for _, piece, each in pairs)))
    else:
        joined.finish_with(Once(*(partial(setitem, piece, ..., each) for peer, piece, each in pairs if peer == me)))
    return joined

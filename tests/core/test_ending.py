from __future__ import annotations

import pytest

import hpccomm as hc


def test_a_group_whose_backend_raises_in_close_is_destroyed_all_the_same(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = hc.new_group()
    backend = group.dispatcher.backends["cpu"]
    close = backend.close

    def fail() -> None:
        close()
        raise KeyboardInterrupt("in close")

    monkeypatch.setattr(backend, "close", fail)
    with pytest.raises(KeyboardInterrupt, match="in close"):
        group.destroy()
    assert group.is_destroyed
    assert group not in process_group.children

from __future__ import annotations

import pytest

from hpccomm.core.ending import call_all

pytestmark = pytest.mark.serial


def test_every_step_is_taken_whatever_one_before_it_raises() -> None:
    taken: list[int] = []

    def step(number: int, error: BaseException | None = None) -> None:
        taken.append(number)
        if error is not None:
            raise error

    errors = [None, ValueError("second"), None, KeyboardInterrupt("fourth"), None]
    with pytest.raises(KeyboardInterrupt, match="fourth") as raised:
        call_all(iter([lambda i=i, each=each: step(i, each) for i, each in enumerate(errors)]))  # type: ignore[misc]
    assert taken == [0, 1, 2, 3, 4]
    assert raised.value.__context__ is errors[1]
    call_all(iter([lambda: step(5)]))
    assert taken[-1] == 5

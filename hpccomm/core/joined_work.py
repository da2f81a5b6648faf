"""Several Works as one."""

from __future__ import annotations

from datetime import timedelta

from .work import Progress, Work, is_of_a_signal_handler


class JoinedWork(Work):
    """Several Works as one, done when all of them are done."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.alive = works
        self._works = works
        each = [work.progress for work in works]
        self.progress = Progress(
            any_thread_may_poll=bool(each) and all(one.any_thread_may_poll for one in each),
            is_released_at_once=any(one.is_released_at_once for one in each),
        )

    @property
    def waits_on_stream(self) -> bool:
        """True if all do."""
        return self._finish is None and {work.waits_on_stream for work in self._works} == {True}

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for all as they do: those on GPUs make this thread's current stream wait, at each call."""
        if timeout is not None or not self.waits_on_stream:
            return super().wait(timeout)
        try:
            self._do_to_all("wait")
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            return super().wait()  # `block` raises it again, and ends this Work
        return True

    def synchronize(self) -> None:
        """Block the host until all are done."""
        super().wait()

    def poll(self) -> bool:
        """Return True if all are done; raise the error of the first failed one."""
        done = [work.has_ended() for work in self._works]  # poll each, so that it makes progress
        if not all(done):
            return False
        self.block()
        return True

    def make_progress(self) -> bool:
        """Let the first Work that can make progress make it."""
        return any(work.make_progress() for work in self._works)

    def block(self) -> None:
        """Block the host until all are done."""
        self._do_to_all("synchronize")

    def _do_to_all(self, method: str) -> None:
        """Call a method of all, even after one has failed; raise the error of the first failed one."""
        first: Exception | None = None
        for work in self._works:
            try:
                getattr(work, method)()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

"""One thing at a time, done by a thread while training goes on."""

import threading
from collections.abc import Callable


class Background:
    """Does one thing after another; what fails there is raised in the thread that asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Begin with this, once what was begun before has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(function,), name="sable-writer", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Return whether something is being done."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of what is being done, and raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.refuse_failed()

    def refuse_failed(self) -> None:
        """Raise what went wrong, if it has ended so."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error

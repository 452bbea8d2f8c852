"""Writes that may fail while a run goes on."""

import dataclasses
from collections.abc import Callable

from tower_train.run_dir import checkpoint


@dataclasses.dataclass
class Attempts:
    """Tells of failures without one line for each: at the first of them, and when all is well again.

    Attributes:
      what: is written.
      then: what becomes of it while it cannot be.
      warn: prints a line.
      failures: since it last succeeded.
    """

    what: str
    then: str
    warn: Callable[[str], None]
    failures: int = 0

    def failed(self, error: Exception) -> None:
        """Counts a failure."""
        self.failures += 1
        if self.failures == 1:
            self.warn(f"*** {self.what} cannot be written ({checkpoint.reason(error)}). {self.then}")

    def succeeded(self) -> None:
        """Ends a row of failures."""
        if self.failures:
            self.warn(f"*** {self.what} can be written again, after {self.failures} failures.")
        self.failures = 0

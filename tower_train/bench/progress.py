"""How far the benchmark is: a bar on a terminal, nothing elsewhere."""

import sys


class Progress:
    """Counts seconds of work done against seconds expected. Use as a context manager.

    The bar is on standard error, so that the table can be redirected to a file.
    """

    def __init__(self):
        self._bar = self._task = None
        if sys.stderr.isatty():
            from rich import console, progress  # comes with Keras, hence with TensorFlow

            self._bar = progress.Progress(
                progress.TextColumn("{task.percentage:>3.0f} %"), progress.BarColumn(), progress.TimeElapsedColumn(),
                progress.TextColumn("(about"), progress.TimeRemainingColumn(), progress.TextColumn("left)"),
                progress.TextColumn("{task.description}"),
                console=console.Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=0.0)

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def expect(self, seconds: float) -> None:
        """There is so much more to do."""
        if self._bar:
            self._bar.update(self._task, total=self._bar.tasks[0].total + seconds)

    def advance(self, seconds: float) -> None:
        """So much of what was expected is done, however long it really took."""
        if self._bar:
            self._bar.advance(self._task, seconds)

    def show(self, what: str) -> None:
        """What is being done."""
        if self._bar:
            self._bar.update(self._task, description=what)

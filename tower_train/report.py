"""Writes a run, even one that is still training, as one HTML file, to be read without a network: python -m
tower_train.report [options] TRAIN_DIR

Writes TRAIN_DIR/report.html, unless another file is there. Exit status: 0 done, 2 an option or a file is wrong.
"""

import dataclasses
import pathlib

from tower_train import console, errors, files
from tower_train.config import RunDataOptions, RunOptions
from tower_train.options import RUN, command_line, option


@dataclasses.dataclass(frozen=True)
class ReportOptions(RunDataOptions):
    """Options of `python -m tower_train.report`."""

    out: str | None = option(None, "the file to write (TRAIN_DIR/report.html)", RUN)


def main(argv) -> int:
    train_dirs: list[str] = []
    options = command_line.parse(argv, ReportOptions, __doc__, files=train_dirs)
    if len(train_dirs) != 1:
        raise errors.ConfigError("Name one run: its directory, as the trainer names it in its first lines.")
    console.import_tensorflow()
    from tower_train.examples import TEST, TRAIN, VALIDATION
    from tower_train.inference import hardest, html_report, saved_run
    from tower_train.run_dir import disk

    chosen = {name: getattr(options, name) for name in ("workload", "dataset", "data_dir")}
    run_options = RunOptions(train_dir=train_dirs[0], **chosen)
    run_dir = saved_run.run_directory(run_options)
    path = pathlib.Path(options.out or run_dir.path / "report.html")
    files.check_replaceable(path, html_report.MARK)
    try:
        run = saved_run.read(run_options, splits=(VALIDATION, TEST, TRAIN))
        found: tuple | str = hardest.hardest(run)
    except errors.UserError as error:  # no checkpoint yet, no data here: the rest can be told
        found = f"Not known: {error}"
    page = html_report.render(run_dir, found)
    disk.write(path, page.encode(errors="replace"))
    console.say(f"Written:  {path.absolute()}")
    return 0


if __name__ == "__main__":
    command_line.run(main)

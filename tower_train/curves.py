"""Draws the loss of training and validation, and the metrics, of runs that have been trained or still train:
python -m tower_train.curves [options] TRAIN_DIR...

Writes curves.png and curves.svg (for one run into its directory, for several into the current folder) and prints the
last, lowest and highest values. Never replaces a file that it did not draw. Needs matplotlib.

Exit status: 0 done, 2 an option or a file is wrong.
"""

import dataclasses
import os

from tower_train import console, errors
from tower_train.inference import curves
from tower_train.options import Options, command_line, option


@dataclasses.dataclass(frozen=True)
class CurvesOptions(Options):
    """Options of `python -m tower_train.curves`."""

    out: str | None = option(None, "the files to write, without their ending (TRAIN_DIR/curves, or curves)", "Files")


def main(argv) -> int:
    train_dirs: list[str] = []
    options = command_line.parse(argv, CurvesOptions, __doc__, files=train_dirs)
    if not train_dirs:
        raise errors.ConfigError("No run is named. Give its directory, as the trainer names it in its first lines.")
    stem = options.out or (os.path.join(train_dirs[0], "curves") if len(train_dirs) == 1 else "curves")
    curves.check_replaceable(stem)
    figure = curves.draw_curves(*train_dirs)
    console.say(*curves.table(train_dirs))
    console.say(curves.save(figure, stem))
    return 0


if __name__ == "__main__":
    command_line.run(main)

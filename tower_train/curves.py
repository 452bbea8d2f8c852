"""python -m tower_train.curves: the curves of one or several runs."""

import dataclasses

from tower_train import console, errors
from tower_train.inference import curves
from tower_train.options import Options, command_line, option

USAGE = """
Draws the loss of training and validation, and the metrics, of runs that have been trained or still train:
python -m tower_train.curves [options] TRAIN_DIR...

Writes OUT.png and OUT.svg, and prints the last, lowest and highest values. Several runs are named by the options in
which they differ.

Exit status: 0 done, 2 an option or a file is wrong.
"""


@dataclasses.dataclass(frozen=True)
class CurvesOptions(Options):
    """Options of `python -m tower_train.curves`."""

    out: str = option("curves", "the files to write, without their ending", "Files")


def main(argv) -> int:
    options = command_line.parse(argv, CurvesOptions, USAGE, files=(train_dirs := []))
    if not train_dirs:
        raise errors.ConfigError("No run is named. Give its directory, as the trainer names it in its first lines.")
    figure = curves.curves(*train_dirs)
    try:
        paths = curves.save(figure, options.out)
    except OSError as error:
        raise errors.ConfigError(
            f"--out={options.out}: {error.strerror}. Name files in a folder that is there."
        ) from None
    console.say(*curves.table(train_dirs), f"Drawn:    {', '.join(paths)}")
    return 0


if __name__ == "__main__":
    command_line.run(main)

"""Measures tower_train, its rivals and this machine's rate of matrix products in turns, each in a process of its own:
python -m tower_train.benchmark [--quick] [options]

Prints a table and writes benchmark.json and, if matplotlib is installed, benchmark.svg and benchmark.png into --out;
other forms write files of their own name.

Exit status: 0 done, 1 a side died or hangs, 2 an option or a file is wrong.
"""

from tower_train import console
from tower_train.bench.sides import BenchmarkOptions
from tower_train.options import command_line


def main(argv) -> int:
    options = command_line.parse(argv, BenchmarkOptions, __doc__)
    console.import_tensorflow()
    from tower_train.bench import breakdown, comparison

    console.say(*(breakdown if options.breakdown else comparison).run(options))
    return 0


if __name__ == "__main__":
    command_line.run(main)

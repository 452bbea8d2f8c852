"""python -m tower_train.benchmark: this trainer, what could be used instead, and what the machine can do."""

from tower_train.bench.options import BenchmarkOptions
from tower_train.options import command_line

USAGE = """
Measures tower_train side by side with its rivals and with this machine's rate of matrix products, each in a process of
its own, taking turns: python -m tower_train.benchmark [--quick] [options]

Prints a table and writes benchmark.json and, where matplotlib is installed, benchmark.png into --out; other forms write
files of their own name.
Exit status: 0 done, 1 a side died or hangs, 2 an option or a file is wrong.
"""


def main(argv) -> int:
    options = command_line.parse(argv, BenchmarkOptions, USAGE)
    if options.breakdown:
        command_line.import_tensorflow()
        from tower_train.bench import breakdown

        lines = breakdown.run(options)
    else:
        from tower_train.bench import compare, overhead, session, sweep

        form = sweep if options.sweep else overhead if options.overhead else compare
        with session.opened(options) as opened:
            lines = form.run(opened)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    command_line.run(main)

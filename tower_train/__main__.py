"""python -m tower_train: flags -> Config -> train."""

from tower_train import errors
from tower_train.console import notice
from tower_train.options import command_line

USAGE = """
Trains a network with one replica (tower) per GPU: python -m tower_train --num_gpus=N [options]

A workload may have options of its own: --workload=NAME --help lists them too.
Without GPUs the towers live on logical CPU devices. A run can be stopped with Ctrl-C and resumed with --train_dir.
Exit status: 0 done, 2 an option or a file is wrong, 3 a loss or gradient was not finite, 4 the last save failed,
5 copies of a variable differ, 130 SIGINT and 143 SIGTERM to this or to another worker, 138 a worker is missing: start
all again.
"""


def main(argv) -> int:
    config, workload_options = command_line.parse_with_workload(argv, USAGE)
    from tower_train.run.train import train

    try:
        result = train(config.workload, config, workload_options=workload_options)
    except errors.WorkerError as error:
        if not config.wait_for_workers or error.exit_status != errors.WorkerError.exit_status:
            raise
        notice(f"{error}\nStarting again, to wait for it.")
        command_line.start_again()
    return result.reason.exit_status


if __name__ == "__main__":
    command_line.run(main)

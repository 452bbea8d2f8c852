"""Trains a network with one replica (tower) per GPU: python -m tower_train --num_gpus=N [options]

Without GPUs the towers live on logical CPU devices. Ctrl-C stops a run, --train_dir resumes it. --help beside
--workload=NAME or --recipe=NAME also lists the workload's options and recipes, and shows the recipe's values.

Exit status: 0 done, 2 an option or a file is wrong, 3 a loss or gradient was not finite, 4 the last save or evaluation
failed, 5 copies of a variable differ, 129 SIGHUP, 130 SIGINT and 143 SIGTERM to this or
another worker, 138 a worker is missing: start all again.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from tower_train import console, errors
from tower_train.config import MOST_USED, Config, RecipeOptions
from tower_train.options import command_line


def parse(argv: Sequence[str]) -> tuple[Config, dict]:
    """Reads a command line with options of the trainer and of the workload.

    TensorFlow is imported for the workload, after mistakes in the trainer's options and --help without --workload and
    --recipe have been answered. Raises ConfigError as command_line.parse; or for no such workload or recipe, or a
    workload with an option of the trainer.

    Returns:
      The Config, completed by the workload's recipe; and {name: value} of the workload's options, --recipe's included.
    """
    trainers = command_line.option_fields(Config, RecipeOptions)
    first = command_line.parse_values(argv, trainers, known_only=True)
    if not first.keys() & {"workload", "recipe"}:
        command_line.answer_help(argv, trainers, __doc__, MOST_USED)
    # Not yet a Config: the workload's recipe may complete the options that go together.
    path = first.get("workload", Config.workload)
    console.import_tensorflow(talkative=first.get("log_device_placement", False))
    from tower_train import workload as workloads

    workload = workloads.load(path, first.get("train_dir"))
    fields = command_line.option_fields(type(workload.options)) if workload.options else {}
    if taken := sorted(set(fields) & set(trainers)):
        raise errors.ConfigError(
            f"--workload={path} has an option --{taken[0]}, as the trainer has. Give it another name."
        )
    values = command_line.parse_values(argv, trainers | fields, known_only=command_line.asks_for_help(argv))
    recipe, seeds = values.pop("recipe", None), values.pop("seeds", None)
    if seeds and "seed" in values:
        raise errors.ConfigError("--seed and --seeds exclude each other. Give one of them.")
    chosen = {name: values.pop(name) for name in fields if name in values}
    if recipe is not None:
        chosen = workload.recipe_options(recipe, chosen)
    workload = workload.with_options(chosen)
    recipes = f"Recipes of {workload.name}: {', '.join(workload.recipes)}." if workload.recipes else ""
    shown = f"Values in brackets are those of {workload.name}'s recipe, where it has any." if workload.recipe else ""
    usage = f"{__doc__}\n{recipes} {shown}"
    command_line.answer_help(argv, trainers | fields, usage, MOST_USED, {**workload.recipe, **chosen})
    return workload.config(**values), chosen


def main(argv: Sequence[str]) -> int:
    config, workload_options = parse(argv)
    seeds = command_line.parse_values(argv, command_line.option_fields(RecipeOptions), known_only=True).get("seeds")
    from tower_train.run import train
    from tower_train.run.training import UserFunctions

    def start_again_if_asked(error: errors.WorkerError) -> None:
        starts_again = (config.wait_for_workers or config.elastic) and not error.is_final
        if starts_again and error.exit_status == errors.WorkerError.exit_status:
            then = "with those that are there" if config.elastic else "to wait for it"
            console.notice(f"{error}\nStarting again, {then}.")
            start_again(error.environment)

    def leave_at_once(error: errors.WorkerError) -> None:
        start_again_if_asked(error)
        os.write(2, f"\ntower_train: error: {console.one_line(str(error))}\n".encode())  # the logger may be stuck too
        os._exit(error.exit_status)

    def train_one(config: Config):
        steps = train.start(config.workload, config, UserFunctions(), workload_options, leave_at_once)
        return train.drain(steps)

    try:
        if seeds:
            from tower_train.run.seeds import train_each

            return train_each(seeds, config, config.workload.rpartition(".")[2], train_one)
        result = train_one(config)
    except errors.WorkerError as error:
        start_again_if_asked(error)
        raise
    return result.reason.exit_status


def start_again(environment: Mapping[str, str]) -> None:
    """Replaces this process by a new run of its command with further variables, which frees its ports and the like."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)


if __name__ == "__main__":
    command_line.run(main)

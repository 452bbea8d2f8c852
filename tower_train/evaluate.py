"""Evaluates a run's newest checkpoint on every test example once:
python -m tower_train.evaluate --train_dir=DIR [options]

Prints the metrics with their 95 % intervals, and writes them to DIR/result.json and, for TensorBoard, to DIR/eval; a
line on standard error says so if that fails. With more than 200 classes there is no confusion
matrix.

Exit status: 0 done, 2 an option or a file is wrong.
"""

from tower_train import console
from tower_train.config import EvaluateOptions
from tower_train.options import command_line


def main(argv) -> int:
    options = command_line.parse(argv, EvaluateOptions, __doc__)
    console.import_tensorflow(talkative=options.log_device_placement)
    from tower_train.inference import report, saved_run

    for evaluation in saved_run.evaluate_run(options):
        lines = report.evaluation_lines(evaluation)
        if evaluation.confusion and not options.watch:
            lines += report.confusion_lines(evaluation.confusion, evaluation.class_names)
        console.say(*lines)
    return 0


if __name__ == "__main__":
    command_line.run(main)

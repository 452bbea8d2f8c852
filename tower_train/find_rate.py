"""Suggests a learning rate, by a range test: python -m tower_train.find_rate [options of the training]

Trains 200 steps, or --max_steps, whose rate grows from 1e-5 to 10 by the same factor each, until the loss is four times
its lowest (Smith 2015, "Cyclical learning rates for training neural networks", section 3.3; fastai's lr_find). Draws
the loss over the rate in find_rate.png in this folder, and suggests the rate at which it falls fastest, or a tenth of
that of its lowest value if this is less. It is for this optimizer and batch, as --learning_rate means it: before
--lr_scaling. Needs one process. No run is saved.

Exit status: 0 done, 2 an option or a file is wrong, or no rate makes the loss fall.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence

import numpy as np

from tower_train import __main__, console, errors
from tower_train.config import MOST_USED, Config, RecipeOptions
from tower_train.inference import curves
from tower_train.options import command_line

_LOWEST, _HIGHEST, _STEPS = 1e-5, 10.0, 200
_SMOOTHING, _DIVERGED = 0.98, 4.0  # as fastai: decay of the loss's moving average; times its lowest
_LEAST_FALL = 0.005  # of the loss; less is noise


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Returns moving averages of losses, without their bias towards 0 (Kingma and Ba 2015, section 3)."""
    averages, average = [], 0.0
    for i, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        averages.append(average / (1 - _SMOOTHING**i))
    return np.array(averages)


def suggested(rates: np.ndarray, losses: np.ndarray) -> float | None:
    """Returns the rate at which the loss falls fastest before its lowest value, or a tenth of the rate of that if this
    is less, as where the fastest fall ends in divergence (fastai's two suggestions); None if the loss does not fall.

    The rates grow by the same factor each. The first tenth of the smoothed losses is not yet smooth, and is not looked
    at, as in fastai.
    """
    first, lowest = len(losses) // 10, int(np.argmin(losses))
    if lowest < first + 2 or losses[first] - losses[lowest] < _LEAST_FALL * abs(losses[first]):
        return None
    return min(rates[first + int(np.argmin(np.gradient(losses[first : lowest + 1])))], rates[lowest] / 10)


def range_test(workload, config: Config, steps: int = _STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Trains with growing rates; returns (rates, smoothed losses)."""
    from tower_train.graph import step_failures
    from tower_train.graph.training import build_step, opened
    from tower_train.run.plan import plan_trial

    config = dataclasses.replace(
        config, max_steps=steps, epochs=None, summary_every_steps=0, stall_timeout_secs=0, keep_hardest=None
    )
    plan, notes = plan_trial(workload, config)
    built, examples = build_step(plan), plan.examples
    losses: list[float] = []
    rates = np.geomspace(_LOWEST, _HIGHEST, steps)
    notice = [f"*** {examples.notice}"] if examples.notice else []
    console.say(f"data:     {examples.name}", *notice, *notes, *built.notes)
    with (
        step_failures.explained(
            examples, workload.name, tower_batch=config.tower_batch, accumulate_steps=config.accumulate_steps
        ),
        opened(built) as session,
        console.ProgressBar(0, steps) as bar,
    ):
        for step, rate in enumerate(rates, start=1):
            loss = float(session.run(built.report, {built.report.learning_rate: rate}).data_loss)
            if not math.isfinite(loss) or has_diverged([*losses, loss]):
                break
            losses.append(loss)
            bar.update(step)
    if not losses:
        raise errors.DataError(f"{examples.name}: the first loss is {loss}. Look at the examples and the network.")
    return rates[: len(losses)], smoothed(losses)


def has_diverged(losses: Sequence[float]) -> bool:
    """Returns whether the last of these losses is far above the lowest, all smoothed."""
    *before, last = smoothed(losses)
    return bool(before) and last > min(before) + (_DIVERGED - 1) * abs(min(before))


def asked_steps(argv: Sequence[str]) -> int:
    """Returns the number of steps that a command line asks for; ConfigError for options that a test cannot follow."""
    given = command_line.parse_values(argv, command_line.option_fields(Config, RecipeOptions), known_only=True)
    for name in ("worker_hosts", "task_index", "elastic", "epochs", "seeds"):
        if name in given:
            raise errors.ConfigError(
                f"--{name}: a range test is of one process and seed, and counts steps. Leave it out."
            )
    return given.get("max_steps", _STEPS)  # not a recipe's


def draw(rates: np.ndarray, losses: np.ndarray, rate: float, label: str) -> str:
    """Draws the loss over the option's rates, the suggested one below a label; returns a line that names the file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(rates, losses, color="#0072b2")
    axis.axvline(rate, color="#d55e00", linewidth=1)
    axis.set_title(label, fontsize=10, color="#d55e00")
    axis.set(xscale="log", xlabel="--learning_rate", ylabel="loss (moving average)")
    axis.grid(color="#dddddd", linewidth=0.5)
    return curves.save(figure, "find_rate", (".png",))


def main(argv) -> int:
    command_line.answer_help(argv, command_line.option_fields(Config, RecipeOptions), __doc__, MOST_USED)
    if not importlib.util.find_spec("matplotlib"):
        raise errors.ConfigError("The curve needs matplotlib: pip install matplotlib.")
    config, workload_options = __main__.parse(argv)
    steps = asked_steps(argv)
    from tower_train.graph import schedule
    from tower_train.workload import load

    curves.check_replaceable("find_rate", (".png",))
    rates, losses = range_test(load(config.workload).with_options(workload_options), config, steps)
    rate = suggested(rates, losses)
    if rate is None:
        raise errors.ConfigError(
            f"--max_steps={len(rates)}: the loss falls at no rate from {_LOWEST:g} to {_HIGHEST:g}. Give more steps or "
            "a larger batch, and look whether the network can learn at all."
        )
    factor = schedule.largest_factor(config)  # of the steps' rates over the option
    chosen = f"--learning_rate={rate / factor:.2g} ({config.optimizer}, {config.global_batch} examples a step)"
    console.say(f"Rate:     {chosen}")
    console.say(draw(np.divide(rates, factor), losses, rate / factor, chosen))
    return 0


if __name__ == "__main__":
    command_line.run(main)

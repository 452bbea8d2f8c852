"""A few small steps of a training on the host, and how far two of them differ."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tower_train.config import Config
from tower_train.console import ProgressBar
from tower_train.examples import Examples
from tower_train.graph import devices, session
from tower_train.graph.step_plan import plan_step
from tower_train.graph.training import build_step
from tower_train.proof.rounding import distance, largest
from tower_train.workload import Workload

v1 = tf.compat.v1
LOSS, _GRADIENT = "the loss", "the gradient of "
_MOST_MS = 600_000
_NEGLIGIBLE = 1e-3  # a variable counts as at least this share of the largest weight


class Trial:
    """A training graph on logical CPU devices, and what is compared of it.

    Attributes:
      built: the graph.
      towers: the batches of a step.
      weights: {name: variable}, those that are trained.
      fetches: the loss, the gradients, all variables after the update, and whether tower 0's gradients move them.
    """

    def __init__(self, workload: Workload, examples: Examples, config: Config, bar: ProgressBar):
        """Builds the graph. bar: advances with it and with each step."""
        self.bar = bar
        placed = devices.place(config, gpus_here=[])
        self.built = build_step(plan_step(workload, examples, config, placed))
        self.towers = self.built.layout.num_towers
        # It takes longer than a few steps save by it.
        placed.session_config.graph_options.rewrite_options.disable_meta_optimizer = True
        placed.session_config.operation_timeout_in_ms = _MOST_MS  # towers may wait for a mean that some do not take
        saved = {v.op.name: v for v in self.built.saved.variables if v.dtype.base_dtype != tf.string}
        self.weights = {name: variable for name, variable in saved.items() if variable.trainable}
        self._initializers = {name: variable.initializer for name, variable in saved.items()}
        compared = self.built.compared
        with self.built.graph.as_default(), tf.device(devices.HOST):
            gradients = {name: tf.convert_to_tensor(each) for name, each in compared.gradients.items()}
            with tf.control_dependencies([self.built.train_op]):
                after = {name: variable.read_value() for name, variable in saved.items()}
            values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in compared.of_loss]
            moves = [tf.reduce_any(tf.not_equal(value, 0)) for value in values if value is not None]
        self.fetches = {LOSS: self.built.report.loss}, gradients, after, moves
        bar.update(advance=1)

    @contextlib.contextmanager
    def begun(self, values: Mapping[str, np.ndarray] | None = None) -> Iterator["Begun"]:
        """Opens a session. values: of the variables; None for initial ones, at step 0."""
        set_variables = functools.partial(assign, initializers=self._initializers, values=values or {})
        with session.opened(self.built, set_variables) as opened:
            yield Begun(self, opened)

    def initial_weights(self) -> dict[str, np.ndarray]:
        """Returns the initial values of the weights."""
        with self.begun() as begun:
            return begun.session.run(self.weights)

    def begins_unlike(self, other: "Trial") -> str | None:
        """Returns a weight that begins at another value in another trial; None if all are the same."""
        values, others = self.initial_weights(), other.initial_weights()
        return next((name for name, value in values.items() if distance(value, others[name])), None)


class Begun:
    """A session of a trial.

    Attributes:
      variables: {name: value} after the last step.
      is_trained: whether a loss had a gradient that is not 0.
      is_finite: whether the first loss and its gradients are.
    """

    def __init__(self, trial: Trial, session: v1.Session):
        self.trial, self.session = trial, session
        self.loss, self.gradients, self.variables, self.is_trained, self.is_finite = {}, {}, {}, False, True

    def step(self) -> None:
        """Does a step, and keeps its values."""
        is_first = not self.loss
        self.loss, self.gradients, self.variables, moves = self.session.run(self.trial.fetches)
        self.is_trained |= any(moves)
        if is_first:
            self.is_finite = all(np.isfinite(each).all() for each in (*self.loss.values(), *self.gradients.values()))
        self.trial.bar.update(advance=1)


def assign(session: v1.Session, initializers: Mapping[str, tf.Operation], values: Mapping[str, np.ndarray]) -> None:
    """Gives variables these values, {name: value}, and others initial ones, by their initializers."""
    names = list(initializers)
    while names:  # once, but for variables whose initial value is one tensor
        feeds = {initializers[name].inputs[1].ref(): (name, values[name]) for name in names if name in values}
        now = [name for name in names if feeds.get(initializers[name].inputs[1].ref(), (name,))[0] == name]
        session.run(
            [initializers[name] for name in now], {tensor.deref(): value for tensor, (_, value) in feeds.items()}
        )
        names = [name for name in names if name not in now]


@dataclasses.dataclass(frozen=True)
class Gap:
    """The distance between two values of one quantity.

    Attributes:
      name: of the quantity.
      step: after which it was seen.
      absolute: the largest difference.
      scale: the largest number of the first value, or at least a share of the largest of its kind.
      largest: the largest number of its kind: of the gradients, or of the weights.
    """

    name: str
    step: int
    absolute: float
    scale: float
    largest: float

    def __str__(self) -> str:
        return f"{self.name} by {self.relative:.0e}" if np.isfinite(self.absolute) else f"{self.name} (inf or NaN)"

    @property
    def relative(self) -> float:
        return self.absolute / self.scale if self.scale else float(self.absolute > 0)

    @property
    def of_largest(self) -> float:
        return self.absolute / max(self.largest, self.scale) if self.scale else float(self.absolute > 0)


def gaps_after(step: int, one: Begun, other: Begun) -> list[Gap]:
    """Returns the gaps after a step in both sessions: of the loss, the gradients and then the variables."""
    gradient = max(map(largest, one.gradients.values()), default=0.0)
    weight = max((largest(one.variables[name]) for name in one.trial.weights), default=0.0)
    return [
        *(_gap(name, step, value, other.loss[name], 0.0, 0.0) for name, value in one.loss.items()),
        *(
            _gap(f"{_GRADIENT}{name}", step, value, other.gradients[name], gradient, gradient)
            for name, value in one.gradients.items()
        ),
        *(
            _gap(name, step, value, other.variables[name], _NEGLIGIBLE * weight, weight)
            for name, value in one.variables.items()
        ),
    ]


def _gap(name: str, step: int, one, other, least: float, most: float) -> Gap:
    return Gap(name, step, distance(one, other), max(least, largest(one)), most)


def earliest(gaps: Sequence[Gap]) -> list[Gap]:
    """Returns the gaps of the earliest step among these, gradients and the relatively largest first."""
    first = min((gap.step for gap in gaps), default=0)
    return sorted(
        (gap for gap in gaps if gap.step == first), key=lambda gap: (not gap.name.startswith(_GRADIENT), -gap.relative)
    )

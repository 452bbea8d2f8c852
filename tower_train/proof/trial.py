"""A few small steps of a training on the host."""

import contextlib
import functools
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from tower_train.config import Config
from tower_train.examples import Examples
from tower_train.graph import devices, session
from tower_train.graph.step_plan import plan_step
from tower_train.graph.training import build_step
from tower_train.proof.comparison import LOSS, Arrays, Training, Values
from tower_train.proof.rounding import distance, rounded
from tower_train.workload import Workload

v1 = tf.compat.v1
_MOST_MS = 600_000


class Trial:
    """A training graph on logical CPU devices, and what is compared of it."""

    def __init__(self, workload: Workload, examples: Examples, config: Config):
        placed = devices.place(config, gpus_here=[])
        self.built = build_step(plan_step(workload, examples, config, placed))
        self.towers = self.built.layout.num_towers  # the batches of a step
        # It takes longer than a few steps save by it; XLA needs it on several CPUs.
        is_optimized = config.jit_compile == "always"
        placed.session_config.graph_options.rewrite_options.disable_meta_optimizer = not is_optimized
        placed.session_config.operation_timeout_in_ms = _MOST_MS  # towers may wait for a mean that some do not take
        saved = {v.op.name: v for v in self.built.saved.variables if v.dtype.base_dtype != tf.string}
        self.weights = {name: variable for name, variable in saved.items() if variable.trainable}  # that are trained
        self._initializers = {name: variable.initializer for name, variable in saved.items()}
        compared = self.built.compared
        with self.built.graph.as_default(), tf.device(devices.HOST):
            gradients = {name: tf.convert_to_tensor(each) for name, each in compared.gradients.items()}
            with tf.control_dependencies([self.built.train_op]):
                after = {name: variable.read_value() for name, variable in saved.items()}
            values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in compared.loss_gradients]
            moves = [tf.reduce_any(tf.not_equal(value, 0)) for value in values if value is not None]
        # moves: whether tower 0's gradients move the variables
        self._fetches = {LOSS: self.built.report.loss}, gradients, after, moves

    @contextlib.contextmanager
    def session(self, values: Arrays | None = None) -> Iterator[v1.Session]:
        """Opens a session. values: of the variables; None for initial ones, at step 0."""
        set_variables = functools.partial(assign, initializers=self._initializers, values=values or {})
        with session.opened(self.built, set_variables) as opened:
            yield opened

    def train(self, steps: int, values: Arrays | None = None) -> Iterator[Values]:
        """Does steps in a session, which begins as in `session`; yields what is seen after each."""
        with self.session(values) as opened:
            for _ in range(steps):
                losses, gradients, variables, moves = opened.run(self._fetches)
                yield Values(variables, losses, gradients, any(moves))

    def initial_weights(self) -> dict[str, np.ndarray]:
        """Returns the initial values of the weights."""
        with self.session() as opened:
            return opened.run(self.weights)

    def training(self, steps: int, rounding: float) -> Training:
        """Returns a training of so many steps, as it is compared."""

        def train(seed: int | None) -> Iterator[Values]:
            weights = {} if seed is None else self.initial_weights()
            return self.train(steps, {name: rounded(value, rounding, seed) for name, value in weights.items()})

        return train

    def begins_unlike(self, other: "Trial") -> str | None:
        """Returns a weight that begins at another value in another trial; None if all are the same."""
        values, others = self.initial_weights(), other.initial_weights()
        return next((name for name, value in values.items() if distance(value, others[name])), None)


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

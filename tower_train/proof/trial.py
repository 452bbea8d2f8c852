"""A few small steps of a training on the host."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tower_train.config import Config
from tower_train.examples import Examples
from tower_train.graph import devices, session
from tower_train.graph.step_plan import plan_step
from tower_train.graph.training import build_step
from tower_train.proof.comparison import LOSS, STEPS, Arrays, Values
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
        with self.built.graph.as_default(), tf.device(devices.HOST):
            self._assign = setter(saved)
            gradients = {name: tf.convert_to_tensor(each) for name, each in self.built.compared.gradients.items()}
            with tf.control_dependencies([self.built.train_op]):
                after = {name: variable.read_value() for name, variable in saved.items()}
        self._before, self._after = saved, Values({LOSS: self.built.report.loss}, gradients, after)

    @contextlib.contextmanager
    def session(self, begin: Arrays) -> Iterator[v1.Session]:
        """Opens a session. begin: values of variables; others have initial ones, at step 0."""

        def set_variables(opened: v1.Session) -> None:
            opened.run([variable.initializer for variable in self.built.saved.variables])
            self._assign(opened, begin)

        with session.opened(self.built, set_variables) as opened:
            yield opened

    def train(self, begin: Arrays) -> Iterator[Values]:
        """Does the steps of a comparison, as its `Training`."""
        with self.session(begin) as opened:
            yield Values({}, {}, opened.run(self._before))
            for _ in range(STEPS):
                yield opened.run(self._after)


def setter(variables: Mapping[str, tf.Variable]) -> Callable[[v1.Session, Arrays], None]:
    """Adds assignments to the current graph; returns a function that gives variables values in a session."""
    holders = {name: v1.placeholder(variable.dtype.base_dtype) for name, variable in variables.items()}
    assigns = {name: v1.assign(variables[name], holder, validate_shape=False) for name, holder in holders.items()}

    def assign(session: v1.Session, values: Arrays) -> None:
        session.run([assigns[name] for name in values], {holders[name]: value for name, value in values.items()})

    return assign

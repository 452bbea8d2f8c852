"""--algorithms: the choice among several algorithms of a layer; with auto the fastest, as timed in trials."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping

import tensorflow as tf

from tower_train import errors, host
from tower_train.cluster.single_process import SingleProcess
from tower_train.config import Config
from tower_train.graph import context
from tower_train.graph.context import Trial
from tower_train.options import rules

v1 = tf.compat.v1

AUTO, USUAL = "auto", "usual"
LEAST_STEPS = 500  # in fewer the trials cost more than they bring
_ROUNDS = 3
_MATRIX = 1024
_HOPELESS = 2.0  # times the best
_LEAST_GAIN = 1.05  # what is that little faster than the usual one may only have met less noise

Algorithms = Mapping[str, Callable[..., tf.Tensor]]
Measure = Callable[[Algorithms, Trial, v1.ConfigProto], Mapping[str, float]]


def time_trials(algorithms: Algorithms, trial: Trial, session_config: v1.ConfigProto) -> dict[str, float]:
    """Runs each algorithm and its gradients a few times, in turn; returns {name: seconds}, the least of each.

    Args:
      algorithms: {name: function of the trial's tensors}.
      trial: their shapes, their dtype, and which have gradients.
      session_config: of the run's sessions, for its threads.
    """
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"), context.entered(context.Context()):
        tensors = [_drawn(f"tensor{i}", shape, trial.dtype) for i, shape in enumerate(trial.shapes)]
        wanted = [tensor for tensor, is_trained in zip(tensors, trial.trained, strict=True) if is_trained]
        fetches = {}
        for name, algorithm in algorithms.items():
            outputs = algorithm(*tensors)
            upstream = _drawn(f"upstream of {name}".replace(" ", "_"), outputs.shape, trial.dtype)
            fetches[name] = [outputs.op, *(gradient.op for gradient in tf.gradients(outputs, wanted, upstream))]
        config = v1.ConfigProto(
            intra_op_parallelism_threads=session_config.intra_op_parallelism_threads,
            inter_op_parallelism_threads=session_config.inter_op_parallelism_threads,
            device_count={"GPU": 0},
        )
        with v1.Session(graph=graph, config=config) as session:
            session.run(v1.global_variables_initializer())
            return _least_seconds({name: session.make_callable(ops) for name, ops in fetches.items()})


def time_products(session_config: v1.ConfigProto) -> dict[str, float]:
    """Returns the seconds of a product of two float32 matrices, by the dtype of the computation."""

    def product_in(dtype):
        return lambda a, b: tf.cast(tf.matmul(tf.cast(a, dtype), tf.cast(b, dtype)), tf.float32)

    trial = Trial(((_MATRIX, _MATRIX),) * 2, tf.float32, (False, False))
    return time_trials({dtype: product_in(dtype) for dtype in ("float32", "bfloat16")}, trial, session_config)


def _least_seconds(runs: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Returns {name: the least time of a run} of those that can run. One far behind the best runs no more.

    While others use the cores too, time is this process's own on them.
    """
    clock, least = time.process_time if host.is_shared() else time.perf_counter, {}
    for name, run in runs.items():
        with contextlib.suppress(tf.errors.OpError):  # this processor or its memory cannot do that
            run()  # plans
            least[name] = math.inf
    for _ in range(_ROUNDS):
        for name in least:
            if least[name] == math.inf or least[name] < _HOPELESS * min(least.values()):
                start = clock()
                runs[name]()
                least[name] = min(least[name], clock() - start)
    return least


def _drawn(name: str, shape, dtype: tf.DType) -> tf.Tensor:
    initializer = v1.random_normal_initializer(seed=0)
    return v1.get_variable(name, shape, dtype, initializer, use_resource=True).read_value()


class Chooser:
    """The algorithms of one start of a run. `choose` is a context's.

    Args:
      asked: --algorithms.
      given: the choice to use: that, or the one of earlier starts.
      membership: of this worker; all use the chief's choice.
      session_config: of this worker's sessions.
      measure: as time_trials.
    """

    def __init__(
        self, asked: str, given: str, membership: SingleProcess, session_config: v1.ConfigProto, measure: Measure
    ):
        self._asked, self._given = asked, given
        self._membership, self._measure = membership, measure
        self._session_config = session_config
        self._chosen, self._known, self._lines = {}, {}, []

    def choose(self, site: str, algorithms: Algorithms, trial: Trial) -> str:
        """Returns the name of the algorithm for a site, the same each time."""
        if site not in self._chosen:
            self._known[site] = tuple(algorithms)
            self._chosen[site] = self._decide(site, algorithms, trial)
            self._membership.tell_algorithm(site, self._chosen[site])
        return self._chosen[site]

    def _decide(self, site: str, algorithms: Algorithms, trial: Trial) -> str:
        usual, *_ = algorithms
        if self._given == AUTO and trial.dtype.size <= 4:  # float64 is for comparing runs
            if self._membership.task.is_chief:
                return self._fastest(site, algorithms, trial)
            name = self._membership.chiefs_algorithm(site)
        else:
            parsed = rules.parse_algorithms(self._given)
            name = parsed if isinstance(parsed, str) else parsed.get(site)
        return name if name in algorithms else usual

    def _fastest(self, site: str, algorithms: Algorithms, trial: Trial) -> str:
        seconds, usual = self._measure(algorithms, trial, self._session_config), next(iter(algorithms))
        best = min(seconds, key=seconds.get, default=usual)
        name = best if best != usual and seconds.get(usual, math.inf) > seconds[best] * _LEAST_GAIN else usual
        found = ", ".join(f"{name} {1e3 * secs:.1f} ms" for name, secs in seconds.items())
        self._lines.append(f"algorithms: {site}={name}; trials: {found}")
        return name

    @property
    def text(self) -> str:
        """Returns the --algorithms that repeat this start's choice; as asked if there was nothing to choose."""
        return ",".join(f"{site}={name}" for site, name in self._chosen.items()) or self._asked

    def notes(self) -> list[str]:
        """Returns lines about the choice; ConfigError if --algorithms names what the network lacks."""
        if self._given == self._asked:
            self._check()
        return self._lines and [*self._lines, f"algorithms: --algorithms={self.text} repeats this choice"]

    def _check(self) -> None:
        parsed = rules.parse_algorithms(self._given)
        if parsed in (AUTO, USUAL):
            return
        every = {name for names in self._known.values() for name in names}
        pairs = parsed.items() if isinstance(parsed, dict) else [(None, parsed)]
        for site, name in pairs:
            if name not in (every if site is None else self._known.get(site, ())):
                there = "; ".join(f"{site}: {', '.join(names)}" for site, names in self._known.items())
                raise errors.ConfigError(
                    f"--algorithms={self._given}: there is no {name}{f' for {site}' if site else ''}. "
                    + (f"This network's sites and algorithms are {there}." if there else "Leave the option out: "
                       "nothing in this network has several algorithms with this dtype on these devices.")
                )  # fmt: skip


def chooser(config: Config, before: Mapping, num_examples: int, membership: SingleProcess) -> Chooser:
    """Returns the Chooser of this start; a run keeps what `auto` chose at its first start.

    Args:
      config: all options.
      before: run.json of the last start; empty for a new run, and in workers that are not the chief.
      num_examples: of an epoch.
      membership: of this worker.
    """
    given = config.algorithms
    if given == AUTO and membership.task.is_chief:
        if before:  # a version without the option had the usual ones only
            given = before.get("config", {}).get("algorithms", USUAL)
        elif config.deterministic or config.last_step(num_examples) < LEAST_STEPS:
            given = USUAL
    return Chooser(config.algorithms, given, membership, membership.devices.session_config, time_trials)


def again(config: Config, membership: SingleProcess) -> Chooser:
    """Returns the Chooser of another graph of a start whose config has the choice of the first."""
    return Chooser(config.algorithms, config.algorithms, membership, membership.devices.session_config, time_trials)

"""The input of a run: its options, and its place in a checkpoint."""

import tensorflow as tf

from tower_train import errors
from tower_train.graph.record import TrainingGraph
from tower_train.workload import Examples

v1 = tf.compat.v1


def check_options(examples: Examples, dump_bad_batch: bool) -> None:
    """Raises ConfigError for an option that these examples cannot serve."""
    if dump_bad_batch and examples.elements:
        raise errors.ConfigError(
            f"--dump_bad_batch: {examples.name} comes in an order of its own, so that no batch can be made again from "
            "its place. Leave the option out."
        )


class StateHook(v1.train.SessionRunHook):
    """Puts the iterator of a graph with a stream_state where the checkpoint says, once it is initialised, and makes
    sure that its state can be saved before a step is done.
    """

    def __init__(self, graph: TrainingGraph, last_step: int):
        self._state, self._name = graph.stream_state, graph.data
        self._needed = last_step * graph.global_batch

    def after_create_session(self, session, coord):
        length = int(session.run(self._state.length))
        if 0 <= length < self._needed:
            raise errors.DataError(
                f"{self._name}: its dataset ends after {length} examples, and this run takes {self._needed}. "
                "Make it endless with .repeat()."
            )
        try:
            session.run(self._state.resume)
        except tf.errors.OpError as error:
            raise errors.RunError(
                f"{self._name}: its dataset cannot be put where the checkpoint says ({errors.reason(error)}). Make "
                "it by the same steps as when the run began, or give another --train_dir."
            ) from None
        try:
            session.run(self._state.note)
        except tf.errors.OpError as error:
            raise errors.DataError(
                f"{self._name}: its dataset cannot be saved in a checkpoint ({errors.reason(error)}), so no run on "
                "it could be resumed. tf.data saves neither Python generators and functions nor stateful operations: "
                "use tf.random.stateless_* and the like, or data that is fetched by index."
            ) from None

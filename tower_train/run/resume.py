"""The checkpoint from which a run resumes."""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.graph.record import TrainingGraph
from tower_train.run import input_stream
from tower_train.run_dir import checkpoint, directory

_SHOWN = 10  # names of variables, at most, in a line


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint at which a start begins.

    Attributes:
      checkpoints: saves the graph's variables.
      path: of the checkpoint to restore; None at step 0.
      step: the last step done.
      restore: sets all variables in a session from the checkpoint; None at step 0.
      notes: lines about damaged checkpoints and variables that the checkpoint lacks.
    """

    checkpoints: checkpoint.Checkpoints
    path: str | None = None
    step: int = 0
    restore: Callable[[tf.compat.v1.Session], None] | None = None
    notes: Sequence[str] = ()


def find(run_dir: directory.RunDirectory, graph: TrainingGraph, config: Config, is_known: bool) -> ResumePoint:
    """Finds the newest intact checkpoint in a locked directory, for a graph that is not finalised.

    With --override it may be of another program (is_known: there was a run.json) or lack variables.

    Raises:
      RunError: the checkpoint is none of this run, or none is intact.
    """
    with graph.graph.as_default():
        checkpoints = checkpoint.Checkpoints(run_dir.path, graph.saved.variables, config.keep_checkpoints)
        newest = checkpoint.latest(run_dir.path)
        if not newest:
            return ResumePoint(checkpoints)
        if not is_known and not config.override:
            raise errors.RunError(
                f"--train_dir={run_dir.path} holds a checkpoint ({newest}) but no {directory.RUN}: it is no run of "
                "this program. Give another directory, or --override to start from that checkpoint."
            )
        newest, notes = checkpoint.newest_intact(run_dir.path)
        begun_anew = []
        if input_stream.begins_anew(graph, newest, checkpoint.variable_names(newest), config.on_worker_change):
            begun_anew = [variable.op.name for variable in graph.stream.state.variables]
            notes.append(
                f"*** {newest} is of another number of workers than {graph.layout.num_workers}: {graph.examples.name} "
                "begins its next epoch, without the rest of the one under way."
            )
        restore, fresh = checkpoints.plan_restore(newest, config.override, begun_anew)
        if fresh:
            shown = ", ".join(fresh[:_SHOWN]) + (f" and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else "")
            notes.append(f"Not in {newest}, initialised afresh: {shown}.")
        return ResumePoint(checkpoints, newest, checkpoint.step_of(newest), restore, notes)

"""The guard against steps whose loss or gradients are not finite, and the file with the batch of such a step."""

import os
import zipfile

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration, say
from tower_train.graph import draws, stream
from tower_train.graph.layout import on_host
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run.actions import Action, Running
from tower_train.run.prepare import Start

v1 = tf.compat.v1
_MOST_DUMPS = 10  # batches written per start
_MOST_NAMES = 3  # in a message
_UNTOUCHED = (
    "This step has not changed the variables, and the last checkpoint stays. Try a lower --learning_rate, or look at "
    "the examples."
)


class Guard(Action):
    """Stops the run at a step that is not finite, or skips it, and names its examples.

    The graph has left the variables unchanged. A skipped step counts: global_step and examples_seen move on, so that
    each step keeps its examples. A step that fails only because the loss scale is too large is always skipped, and is
    no fault.

    Attributes:
      loss: of the last step that was not skipped; None before one.
      skipped: number of steps skipped for a fault.
    """

    def __init__(self, running: Running):
        self._start, config = running.start, running.start.config
        self._most_in_a_row = config.max_nonfinite_in_a_row if config.on_nonfinite == "skip" else None
        self._dumps_left = _MOST_DUMPS if config.dump_bad_batch and running.start.is_chief else 0
        self._in_a_row = self.skipped = 0
        self.loss: float | None = None

    def __call__(self, step, report):
        if report.finite.all():
            self._in_a_row, self.loss = 0, report.loss
            return
        if report.loss_scale and report.loss_scale.overflowed:
            say(f"*** loss scale: too great at step {step}, which is skipped; now {report.loss_scale.scale:g}.")
            return
        skips, global_batch = self._most_in_a_row is not None, self._start.graph.layout.global_batch
        first = int(report.examples) - skips * global_batch  # a step that ends the run has not counted its examples
        about = f"not finite at step {step}: {_what_is_not_finite(self._start.graph, report)}. Its batch: positions "
        about += f"{first} to {first + global_batch - 1} of the stream of examples{self._dumped(step, first)}"
        if not skips:
            raise errors.NonFiniteError(f"{about}. {_UNTOUCHED}")
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self._most_in_a_row:
            raise errors.NonFiniteError(
                f"{about}. It is number {self._in_a_row} in a row, as many as --max_nonfinite_in_a_row allows. "
                f"{_UNTOUCHED}"
            )
        say(f"*** {about}. Skipped: the variables are as before; {self.skipped} skipped since this start.")

    def _dumped(self, step: int, first: int) -> str:
        if not self._dumps_left:
            return ""
        self._dumps_left -= 1
        return f", written to {_write_batch(self._start, step, first)}"


def check_variables(session: v1.Session, graph: TrainingGraph, step: int) -> None:
    """Raises NonFiniteError for a variable, before it is saved: updates may overflow with a finite loss and
    gradients."""
    bad = [name for name, is_finite in session.run(graph.saved.finite).items() if not is_finite]
    if bad:
        raise errors.NonFiniteError(
            f"not finite after step {step}: the update overflowed in {enumeration(bad, _MOST_NAMES)}. It was not "
            "saved, and the last checkpoint stays. Try a lower --learning_rate."
        )


def _what_is_not_finite(graph: TrainingGraph, report: StepReport) -> str:
    """Names the towers and tensors at fault in a step."""
    everywhere = "the mean over towers" + (" of all workers" if graph.layout.num_workers > 1 else "")
    rows = [f"tower_{i}" for i in range(graph.layout.num_towers)] + [everywhere]
    faults = []
    for row, flags in zip(rows, report.finite, strict=True):
        bad = [name for name, is_finite in zip(graph.checked, flags, strict=True) if not is_finite]
        if bad and not (faults and row == everywhere):  # the mean is at fault only if no tower is
            faults.append(f"{row}: {enumeration(bad, _MOST_NAMES)}")
    return "; ".join(faults)


def _write_batch(start: Start, step: int, first: int) -> str:
    """Writes the batch of a step, from its first position in the stream, to bad_batch-STEP.npz; returns its path or the
    failure.

    The file holds `positions` and `indices`, int64 [global batch], and the towers' inputs after augmentation, joined in
    their order: `features` and `labels`, or features_0, features_1, ... for several tensors.
    """
    path = start.run_dir.path / f"bad_batch-{step}.npz"
    temporary = path.with_name(f".bad_batch-{step}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **_batch(start, first))
        os.replace(temporary, path)
    except (OSError, tf.errors.OpError, zipfile.BadZipFile) as error:
        temporary.unlink(missing_ok=True)
        return f"{path}, which failed ({errors.reason(error)})"
    return str(path)


def _batch(start: Start, first: int) -> dict[str, np.ndarray]:
    """Makes the batch of a step again, from its first position in the stream."""
    examples, config = start.examples, start.config
    whole_step = on_host(config.tower_batch, config.batches_per_step)
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        again = stream.training_stream(
            start.workload, examples, config.seed, tf.constant(first, tf.int64), whole_step
        )  # fmt: skip
        positions = first + tf.range(whole_step.worker_batch, dtype=tf.int64)
        fetches = positions, draws.shuffled_indices(positions, examples.num_examples, config.seed), again.batches
        with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
            session.run([v1.tables_initializer(), again.initializer])
            positions, indices, batches = session.run(fetches)
    arrays = {"positions": positions, "indices": indices}
    for i, name in enumerate(("features", "labels")):
        towers = zip(*(tf.nest.flatten(batch[i]) for batch in batches), strict=True)
        tensors = [np.concatenate(parts) for parts in towers]
        arrays |= {name if len(tensors) == 1 else f"{name}_{j}": tensor for j, tensor in enumerate(tensors)}
    return arrays

"""The result of a run, its stop reason, and result.json."""

import dataclasses
import enum
import signal

from tower_train import errors
from tower_train.cluster.agreement import RunOver
from tower_train.cluster.rendezvous import RESIZED as ANOTHER_SIZE
from tower_train.run_dir import directory


class StopReason(str, enum.Enum):
    """The reason why a start of a run ended. SIGINT and SIGTERM have the names of the signals."""

    LAST_STEP = "last step"
    SIGINT = "SIGINT"
    SIGTERM = "SIGTERM"
    NO_GAIN = "no gain"
    SESSION_HOOK = "a session hook"
    RESIZED = ANOTHER_SIZE
    ANOTHER_WORKER = "another worker"
    ERROR = "an error"

    def text(self, no_gain_epochs: float) -> str:
        """Returns the words for people and result.json."""
        return f"no gain for {no_gain_epochs:g} epochs" if self is StopReason.NO_GAIN else self.value

    @property
    def exit_status(self) -> int:
        return 128 + signal.Signals[self.name] if self.name in signal.Signals.__members__ else 0


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run; also the content of result.json, beside the last evaluation.

    Attributes:
      train_dir: of the run; empty in a worker that is not the chief.
      step: the last step, over all starts.
      loss: at the last step that was not skipped; None if there was none.
      examples_per_sec: over this start's steps after its first; None if there were none.
      seconds: duration of this start, from opening the session to the last save.
      training_secs: of these, from the beginning of this start's first step to the end of its last, less evaluations;
        None if there were no steps.
      reason: why the run stopped; not in result.json.
      stopped_by: the same as text: 'last step', 'SIGINT', 'SIGTERM', 'no gain for K epochs' or 'a session hook', of any
        worker; in result.json also 'another worker', or the message of a NonFiniteError.
      checkpoint: path of the newest checkpoint.
      data: name of the training examples.
      notice: remark on the data for the user, or None.
      failed_saves: saves of this start that failed.
      skipped_steps: steps of this start whose update was skipped by --on_nonfinite=skip.
    """

    train_dir: str
    step: int
    loss: float | None
    examples_per_sec: float | None
    seconds: float
    reason: StopReason
    stopped_by: str
    checkpoint: str | None
    data: str = ""
    notice: str | None = None
    failed_saves: int = 0
    skipped_steps: int = 0
    training_secs: float | None = None

    def as_dict(self) -> dict:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "reason"}


def write(
    run_dir: directory.RunDirectory, result: Result, failure: errors.UserError | None, evaluations: dict
) -> errors.UserError | None:
    """Writes result.json; returns the steps' failure, or else the failure to write result.json."""
    try:
        # A start without steps keeps the earlier result.
        if result.training_secs is not None or run_dir.read(directory.RESULT).get("step") != result.step:
            run_dir.update(directory.RESULT, result.as_dict() | evaluations)
        elif changed := evaluations | ({"stopped_by": result.stopped_by} if failure else {}):
            run_dir.update(directory.RESULT, changed)
    except errors.RunError as error:
        return failure or save_error(result.step, str(error).rstrip("."))
    return failure


def without_part(over: RunOver, no_gain_epochs: float) -> Result:
    """Returns the result of a worker that waited for a place until the run was over."""
    reason = StopReason(over.stopped_by)
    return Result("", over.step, None, None, 0.0, reason, reason.text(no_gain_epochs), None)


def save_error(step: int, why: str) -> errors.SaveError:
    """Makes the error of a finished training that could not be written."""
    return errors.SaveError(f"training ended at step {step}, but {why}. The same command goes on.")

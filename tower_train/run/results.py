"""The result of a run, why it stopped, and result.json."""

import dataclasses
import enum
import signal

from tower_train import errors
from tower_train.cluster import single_process
from tower_train.run_dir import directory


class StopReason(str, enum.Enum):
    """The reason why a start of a run ended. SIGINT and SIGTERM have the names of the signals."""

    LAST_STEP = "last step"
    SIGINT = "SIGINT"
    SIGTERM = "SIGTERM"
    NO_GAIN = "no gain"
    SESSION_HOOK = "a session hook"
    RESIZED = single_process.RESIZED
    ANOTHER_WORKER = "another worker"
    ERROR = "an error"

    def text(self, no_gain_epochs: float) -> str:
        """The words for people and result.json."""
        return f"no gain for {no_gain_epochs:g} epochs" if self is StopReason.NO_GAIN else self.value

    @property
    def exit_status(self) -> int:
        """Of the command."""
        return 128 + signal.Signals[self.name] if self.name in signal.Signals.__members__ else 0


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run; also what result.json holds, beside the last evaluation.

    Attributes:
      train_dir: where the run is; empty in a worker that is not the chief.
      step: the last step, over all starts.
      loss: at the last step that was not skipped; None if there was none.
      examples_per_sec: over this start's steps after its first; None if there were none.
      seconds: this start took, from opening the session to the last save.
      training_secs: of these, from the beginning of this start's first step to the end of its last, less evaluations;
        None if there were no steps.
      reason: why the run stopped; not in result.json.
      stopped_by: the same as text: 'last step', 'SIGINT', 'SIGTERM', 'no gain for K epochs' or 'a session hook', of
        whichever worker; in result.json also 'another worker', or the message of a NonFiniteError.
      checkpoint: path of the newest checkpoint.
      data: what was trained on.
      notice: what the user must know of the data, or None.
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
        """For result.json."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "reason"}


def write(
    run_dir: directory.RunDirectory, result: Result, failure: errors.UserError | None, evaluations: dict
) -> errors.UserError | None:
    """Writes result.json; returns the failure of the run's steps, or else that result.json cannot be written."""
    try:
        # A start that did no step leaves the result of the one that did.
        if result.training_secs is not None or run_dir.read(directory.RESULT).get("step") != result.step:
            run_dir.update(directory.RESULT, result.as_dict() | evaluations)
        elif changed := evaluations | ({"stopped_by": result.stopped_by} if failure else {}):
            run_dir.update(directory.RESULT, changed)
    except errors.RunError as error:
        return failure or save_error(result.step, str(error).rstrip("."))
    return failure


def without_part(over: single_process.RunOver, no_gain_epochs: float) -> Result:
    """The result of a worker that waited for a place until the run was over."""
    reason = StopReason(over.stopped_by)
    return Result("", over.step, None, None, 0.0, reason, reason.text(no_gain_epochs), None)


def evaluation_error(step: int, cause: Exception) -> errors.EvaluationError:
    """The error of a run that trained to its end and could not be evaluated there."""
    error = errors.EvaluationError(
        f"training ended at step {step} and is saved, but the last evaluation failed: {errors.reason(cause)}. Mend "
        "that, then evaluate it with `python -m tower_train.evaluate`."
    )
    error.__cause__ = cause
    return error


def save_error(step: int, why: str) -> errors.SaveError:
    """The error of a run that trained to its end and could not write something down."""
    return errors.SaveError(f"training ended at step {step}, but {why}. The same command goes on.")

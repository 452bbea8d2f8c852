"""The result of a run, its stop reason, and result.json."""

import dataclasses
import enum
import signal
from collections.abc import Mapping

from tower_train import errors
from tower_train.cluster.rendezvous import RESIZED as ANOTHER_SIZE
from tower_train.inference import curves
from tower_train.inference.evaluator import Evaluation
from tower_train.inference.saved_run import RESULT_NAMES
from tower_train.run_dir import directory


class StopReason(str, enum.Enum):
    """The reason why a start of a run ended. Signals have their names."""

    LAST_STEP = "last step"
    SIGINT = "SIGINT"
    SIGTERM = "SIGTERM"
    SIGHUP = "SIGHUP"
    NO_GAIN = "no gain"
    PROGRAM = "the program"  # which left its loop over the steps, or asked by after_step
    RESIZED = ANOTHER_SIZE
    ANOTHER_WORKER = "another worker"
    ERROR = "an error"

    @property
    def exit_status(self) -> int:
        return 128 + signal.Signals[self.name] if self.name in signal.Signals.__members__ else 0


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run; as_dict is the content of result.json, besides the last evaluations."""

    train_dir: str  # of the run; empty in a worker that is not the chief
    step: int  # the last step, over all starts
    loss: float | None  # at the last step that was not skipped; None if there was none
    examples_per_sec: float | None  # over this start's steps after its first; None if there were none
    seconds: float  # of this start, from the finished graph to the last save
    reason: StopReason  # why the run stopped, in any worker
    checkpoint: str | None  # path of the newest checkpoint
    data: str = ""  # name of the training examples
    notice: str | None = None  # remark on data that stand in for others
    failed_saves: int = 0  # saves of this start that failed
    skipped_steps: int = 0  # steps of this start whose update was skipped by --on_nonfinite=skip
    # from the begin of this start's first step to the end of its last, less evaluations; None without steps
    training_secs: float | None = None
    # the error that ended the steps, or of the last save or evaluation; None if all went well
    failure: errors.UserError | None = None

    @property
    def history(self) -> dict[str, list]:
        """The log lines and evaluations of all starts of the run: {name: values}, by the names of Keras' History."""
        return curves.history(self.train_dir)

    @property
    def stopped_by(self) -> str:
        """The reason in words, or the message of the error that ended the steps."""
        return str(self.failure) if self.reason is StopReason.ERROR else self.reason.value

    def as_dict(self) -> dict:
        """Returns the content of result.json."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("reason", "failure")]
        return {name: getattr(self, name) for name in [*names, "stopped_by"]}


def write(
    run_dir: directory.RunDirectory, started: str, result: Result, evaluations: Mapping[str, Evaluation]
) -> errors.UserError | None:
    """Writes result.json; returns the result's failure, or else the failure to write. started: of run.json, which shows
    that this start ended; evaluations: the last ones, by split."""
    try:
        run_dir.check_held()
        before, changed = run_dir.read(directory.RESULT), {"started": started}
        changed |= {RESULT_NAMES[split]: evaluation.as_dict() for split, evaluation in evaluations.items()}
        # a start without steps keeps the earlier result, such as its rate
        if result.training_secs is not None or before.get("step") != result.step:
            changed |= result.as_dict()
            if result.training_secs is None:  # the start before was killed after its last save
                records = run_dir.records().values()
                changed["loss"] = {each["step"]: each["loss"] for each in records if "loss" in each}.get(result.step)
        elif result.failure:
            changed["stopped_by"] = result.stopped_by
        run_dir.update(directory.RESULT, changed)
    except (errors.RunError, OSError) as error:
        why = str(error).rstrip(".") if isinstance(error, errors.RunError) else f"{run_dir.path}: {error.strerror}"
        return result.failure or save_error(result.step, why)
    return result.failure


def save_error(step: int, why: str) -> errors.SaveError:
    """Makes the error of a finished training that could not be written."""
    return errors.SaveError(f"training ended at step {step}, but {why}. The same command goes on.")

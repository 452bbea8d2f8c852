"""Errors that a user can mend. Commands print their text as one line and exit with `exit_status`."""

from collections.abc import Mapping


class UserError(ValueError):
    """An error of the user's: what was received, what is allowed and what to do, in one line without traceback."""

    exit_status = 2  # as of argparse and of the shell's own usage errors


class ConfigError(UserError):
    """An option or a combination of options that cannot be."""


class DataError(UserError):
    """A data file that is missing, damaged or not what its name says."""


class LayoutError(DataError):
    """Folders that are not laid out as they should be; the text goes on with a tree of those that are expected."""


class RunError(UserError):
    """A train_dir that cannot be used, or not by this run."""


class GraphError(UserError):
    """A workload whose graph breaks a rule of the towers."""


class SaveError(RunError):
    """Training went on to its end, but its last checkpoint or result could not be written."""

    exit_status = 4


class EvaluationError(RunError):
    """Training went on to its end, but the last evaluation failed."""

    exit_status = 4


class MirrorError(UserError):
    """Copies of a variable that are no longer the same."""

    exit_status = 5


class AllReduceError(UserError):
    """A mean between devices that came out wrong before the first step."""

    exit_status = 5


class WorkerError(UserError):
    """A worker of the cluster that is missing or has failed; another start goes on from the last checkpoint.

    Attributes:
      is_final: whether the process must not start itself again.
      environment: variables for the next start of this process, if it does.
    """

    is_final = False
    environment: Mapping[str, str] = {}

    # To be started again: with restartPolicy ExitCode Kubeflow's training operator does so from 128 on, its predecessor
    # at 138 too, which is the one left to users (IsRetryableExitCode in their pkg/util/train/train_util.go).
    exit_status = 138


class NonFiniteError(UserError):
    """A loss or a gradient that is NaN or infinite; the variables were not touched."""

    exit_status = 3


def reason(error: Exception) -> str:
    """The one line of an exception that says why it was raised, without the graph that TensorFlow puts around it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(getattr(error, "message", error)).removeprefix("Graph execution error:")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("From /job:")]
    node = next((i for i, line in enumerate(lines) if line.startswith("Node: ")), -1)  # the reason comes next
    return (lines[node + 1 :] or lines or [type(error).__name__])[0].strip().rstrip(".")

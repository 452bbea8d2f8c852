"""Errors that a user can correct. Commands print their text as one line and exit with `exit_status`."""

from collections.abc import Mapping


class UserError(ValueError):
    """A user's mistake: what was received, what is allowed and what to do, in one line without traceback."""

    exit_status = 2  # as of argparse and of the shell's own usage errors


class ConfigError(UserError):
    """An option, or a combination of options, that is not allowed."""


class DataError(UserError):
    """A data file that is missing, damaged or of another kind than its name says."""


class RunError(UserError):
    """A train_dir that cannot be used, or not by this run."""


class GraphError(UserError):
    """A workload whose graph breaks a rule of the towers; the text may have several lines."""


class SaveError(RunError):
    """A finished training whose last checkpoint or result could not be written."""

    exit_status = 4


class EvaluationError(RunError):
    """A finished training whose last evaluation failed."""

    exit_status = 4


class MirrorError(UserError):
    """Copies of a variable that are no longer the same."""

    exit_status = 5


class WorkerError(UserError):
    """A missing or failed worker of the cluster; another start resumes from the last checkpoint, unless is_final, with
    these variables added to the environment."""

    # To be started again: with restartPolicy ExitCode Kubeflow's training operator does so from 128 on, its predecessor
    # at 138 too, which is the one left to users (IsRetryableExitCode in their pkg/util/train/train_util.go).
    exit_status = 138

    def __init__(
        self,
        text: str,
        exit_status: int = exit_status,
        is_final: bool = False,
        environment: Mapping[str, str] | None = None,
    ):
        super().__init__(text)
        self.exit_status, self.is_final, self.environment = exit_status, is_final, dict(environment or {})


class NonFiniteError(UserError):
    """A loss or a gradient that is NaN or infinite; the variables were not touched."""

    exit_status = 3


def described(value) -> str:
    """Describes a value that a user's function returned: None, 0.5 (float), tensor float32 (8, 3)."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        noun = "tensor" if "Tensor" in kind else "numpy array"
        return f"{noun} {getattr(value.dtype, 'name', value.dtype)} {value.shape}"
    if isinstance(value, (tuple, list)) and value:
        return f"a {kind} of {', '.join(map(described, value[:5]))}"
    if isinstance(value, dict) and value:
        return f"a dict of {', '.join(f'{name!r}: {described(part)}' for name, part in [*value.items()][:5])}"
    shown = repr(value)
    return f"{shown} ({kind})" if len(shown) < 60 else f"a value of type {kind}"


def returned(owner: str, function: str, value, wanted: str) -> GraphError:
    """Makes the error for a user's function that returned something else than it may. owner: 'workload mine', say.
    wanted: the allowed values, after "Let it return "."""
    return GraphError(f"{owner}: {function} returned {described(value)}. Let it return {wanted}.")


def reason(error: Exception) -> str:
    """Returns the one line of an exception that gives its cause, without the graph that TensorFlow puts around it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(getattr(error, "message", error)).removeprefix("Graph execution error:")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("From /job:")]
    node = next((i for i, line in enumerate(lines) if line.startswith("Node: ")), -1)  # the reason comes next
    lines = [line for line in lines[node + 1 :] if not line.startswith("Exception encountered when calling")] or lines
    line = (lines or [type(error).__name__])[0].removeprefix("\x1b[1m").removesuffix("\x1b[0m")
    return line.partition(" with these attrs")[0].strip().rstrip(".:")

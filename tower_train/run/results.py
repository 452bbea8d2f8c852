"""What comes out of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run; also what result.json holds, beside the last evaluation.

    Attributes:
      train_dir: where the run is.
      step: the last step, over all starts.
      loss: at that step; None where this start did no step.
      examples_per_sec: over this start's steps after its first; None where there were none.
      seconds: this start took, from opening the session to the last save.
      training_secs: of these, from the beginning of this start's first step to the end of its last, less evaluations;
        None where there were no steps.
      stopped_by: 'last step', 'SIGINT', 'SIGTERM', 'no gain for K epochs' or 'a session hook', of whichever worker; in
        result.json also 'another worker', or the message of a NonFiniteError.
      checkpoint: path of the newest checkpoint.
      data: what was trained on.
      notice: what the user must know of the data, or None.
      failed_saves: saves of this start that failed.
      skipped_steps: steps of this start whose update was skipped, see --on_nonfinite.
    """

    train_dir: str
    step: int
    loss: float | None
    examples_per_sec: float | None
    seconds: float
    stopped_by: str
    checkpoint: str | None
    data: str = ""
    notice: str | None = None
    failed_saves: int = 0
    skipped_steps: int = 0
    training_secs: float | None = None

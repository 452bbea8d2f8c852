"""The settings of an Estimator: RunConfig and WarmStartSettings."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tower_train import errors

_DEFAULT_SAVE_SECS = 600


class WarmStartSettings(NamedTuple):
    """The values that variables begin with; the arguments are those of tf.compat.v1.train.warm_start."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: object = ".*"
    var_name_to_vocab_info: dict | None = None
    var_name_to_prev_var_name: dict | None = None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of an Estimator's runs. Names and defaults are those of TensorFlow 1.15; num_gpus and gpus are new.

    Attributes:
      model_dir: the directory of checkpoints and events.
      tf_random_seed: seed of the graph's random ops and of initial weights; None for another one each time.
      save_summary_steps: steps between summaries; None for none.
      save_checkpoints_steps: steps between checkpoints; the first and the last step are saved too.
      save_checkpoints_secs: seconds between checkpoints, instead of steps; 600 if neither is given.
      session_config: a tf.compat.v1.ConfigProto.
      keep_checkpoint_max: newest checkpoints kept; 0 or None for all.
      keep_checkpoint_every_n_hours: one more is kept each so many hours.
      log_step_count_steps: steps between log lines of the loss and of steps/sec; None for none.
      train_distribute: a tf.distribute strategy, whose number of replicas is taken for num_gpus.
      num_gpus: towers that train; None for one.
      gpus: the ids of the GPUs that carry them, instead of num_gpus.

    Raises:
      ConfigError: values out of range, or that exclude each other.
    """

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: int | None = None
    session_config: tf.compat.v1.ConfigProto | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    num_gpus: int | None = None
    gpus: Sequence[int] | None = None

    # There is one process here, the chief of 1.15.
    is_chief: ClassVar[bool] = True
    task_type: ClassVar[str] = "worker"
    task_id: ClassVar[int] = 0
    num_worker_replicas: ClassVar[int] = 1
    master: ClassVar[str] = ""

    def __post_init__(self):
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise errors.ConfigError(
                f"save_checkpoints_steps={self.save_checkpoints_steps} and save_checkpoints_secs="
                f"{self.save_checkpoints_secs} both say when to save. Give one of them."
            )
        if self.save_checkpoints_steps is None and self.save_checkpoints_secs is None:
            object.__setattr__(self, "save_checkpoints_secs", _DEFAULT_SAVE_SECS)
        if self.model_dir is not None:
            object.__setattr__(self, "model_dir", os.fspath(self.model_dir))
        positive = ("save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs", "log_step_count_steps")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise errors.ConfigError(f"RunConfig: {name}={value}; it must be above 0, or None.")
        given = [name for name in ("train_distribute", "num_gpus", "gpus") if getattr(self, name) is not None]
        if len(given) > 1:
            raise errors.ConfigError(f"RunConfig: {' and '.join(given)} both say what trains. Give one of them.")

    @property
    def towers(self) -> int | Sequence[int]:
        """The number of towers that train, or the ids of their GPUs."""
        if self.gpus is not None:
            return self.gpus
        if self.train_distribute is not None:
            return self.train_distribute.num_replicas_in_sync
        return 1 if self.num_gpus is None else self.num_gpus

    def replace(self, **changes) -> "RunConfig":
        """Returns a copy with other values."""
        if "save_checkpoints_steps" in changes:
            changes.setdefault("save_checkpoints_secs", None)
        elif "save_checkpoints_secs" in changes:
            changes.setdefault("save_checkpoints_steps", None)
        return dataclasses.replace(self, **changes)

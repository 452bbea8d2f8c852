"""Rules between the options of a training. No TensorFlow here."""

from collections.abc import Mapping
from typing import Any

from tower_train import errors
from tower_train.options import Options, as_text, points

# An option, the values with which others are of use, and those others.
_OF_USE = (
    ("max_steps", lambda value: not value, ("epochs",)),
    ("epochs", lambda value: not value, ("max_steps",)),
    ("batch_size", lambda value: not value, ("global_batch_size",)),
    ("global_batch_size", lambda value: not value, ("batch_size",)),
    ("lr_schedule", lambda value: value == "piecewise", ("lr_boundaries",)),
    ("lr_schedule", lambda value: value == "points", ("lr_points",)),
    ("optimizer", lambda value: value == "momentum", ("nesterov",)),
    ("optimizer", lambda value: value in ("momentum", "lars"), ("momentum",)),
    ("lr_scaling", lambda value: value != "none", ("lr_base_batch",)),
    ("on_nonfinite", lambda value: value == "skip", ("max_nonfinite_in_a_row",)),
    ("variable_update", lambda value: value == "mirrored", ("all_reduce",)),
    ("lookahead_every_steps", bool, ("lookahead_decay", "lookahead_ramp")),
)


def without_useless(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe holds, by name, less what is of no use beside the options that a user gave."""
    useless = {
        other for name, is_of_use, others in _OF_USE if name in given and not is_of_use(given[name]) for other in others
    }
    return {name: value for name, value in recipe.items() if name not in useless}


def is_given(options: Options, name: str) -> bool:
    """Whether an option is not as by default; one that is may be given too, which is no mistake."""
    return getattr(options, name) != getattr(type(options), name)


def check(config: Options) -> None:
    """Looks at a Config as a whole.

    Raises:
      ConfigError: options that exclude or need each other.
    """
    _check_length(config)
    _check_batch(config)
    _check_schedule(config)
    _check_update(config)
    _check_workers(config)


def _check_length(config: Options) -> None:
    for name in ("keep_best", "stop_after_no_gain_epochs"):
        if getattr(config, name) and not config.eval_every_steps:
            raise errors.ConfigError(
                f"--{name} needs evaluations during training. Say how often with --eval_every_steps."
            )
    evaluates = config.eval_every_steps or config.eval_at_end
    if config.train_eval_examples and is_given(config, "train_eval_examples") and not evaluates:
        raise errors.ConfigError(
            f"--train_eval_examples={config.train_eval_examples} is for evaluations during training. Say when with "
            "--eval_every_steps or --eval_at_end."
        )
    if config.max_steps and config.epochs:
        raise errors.ConfigError(
            f"--max_steps={config.max_steps} and --epochs={config.epochs:g} both say when to stop. Give one of them."
        )


def _check_batch(config: Options) -> None:
    if not config.global_batch_size:
        return
    if config.batch_size:
        raise errors.ConfigError(
            f"--batch_size={config.batch_size} and --global_batch_size={config.global_batch_size} both say how many "
            "examples a step has. Give one of them."
        )
    if config.global_batch_size % config.batches_per_step:
        raise errors.ConfigError(
            f"--global_batch_size={config.global_batch_size} cannot be shared out evenly among {config.num_workers} "
            f"workers x {config.num_towers} towers x {config.accumulate_steps} batches each. Choose a multiple of "
            f"{config.batches_per_step}."
        )


def _check_schedule(config: Options) -> None:
    for schedule, name, needed in (("piecewise", "lr_boundaries", "boundaries"), ("points", "lr_points", "points")):
        given = getattr(config, name)
        if (config.lr_schedule == schedule) != (given is not None):
            raise errors.ConfigError(
                f"--lr_schedule={config.lr_schedule} and --{name}={'none' if given is None else as_text(given)}: "
                f"{schedule} needs {needed}, and nothing else has them."
            )
    if config.lr_scaling == "none" and is_given(config, "lr_base_batch"):
        raise errors.ConfigError(f"--lr_base_batch={config.lr_base_batch} is for --lr_scaling=linear or sqrt.")
    if config.lr_points is not None:
        points.parse(config.lr_points, "lr_points")


def _check_update(config: Options) -> None:
    if config.variable_update == "cpu" and config.all_reduce:
        raise errors.ConfigError(f"--all_reduce={config.all_reduce} is for --variable_update=mirrored.")
    if config.nesterov and config.optimizer != "momentum":
        raise errors.ConfigError(f"--nesterov is for --optimizer=momentum, not for {config.optimizer}.")
    if config.optimizer not in ("momentum", "lars") and is_given(config, "momentum"):
        raise errors.ConfigError(
            f"--momentum={config.momentum:g} is for --optimizer=momentum or lars, not for {config.optimizer}."
        )
    if config.on_nonfinite != "skip" and is_given(config, "max_nonfinite_in_a_row"):
        raise errors.ConfigError(
            f"--max_nonfinite_in_a_row={config.max_nonfinite_in_a_row} is for --on_nonfinite=skip."
        )
    for name in ("lookahead_decay", "lookahead_ramp"):
        if not config.lookahead_every_steps and is_given(config, name):
            raise errors.ConfigError(
                f"--{name}={getattr(config, name):g} is for --lookahead_every_steps. Say how often there."
            )
    if config.sync_batch_norm and config.accumulate_steps > 1:
        raise errors.ConfigError(
            f"--sync_batch_norm and --accumulate_steps={config.accumulate_steps} exclude each other: one tower's "
            "batches come after each other, so they cannot share statistics."
        )


def _check_workers(config: Options) -> None:
    hosts = config.worker_hosts.split(",") if config.worker_hosts is not None else []
    if bool(hosts) != (config.task_index is not None) or (hosts and config.task_index >= len(hosts)):
        raise errors.ConfigError(
            f"--worker_hosts={config.worker_hosts} and --task_index={config.task_index}: give both, the index from 0 "
            "to the number of hosts less one."
        )
    if not all(host.rpartition(":")[0] and host.rpartition(":")[2].isdigit() for host in hosts):
        raise errors.ConfigError(f"--worker_hosts={config.worker_hosts}: each must be host:port.")
    if len(set(hosts)) != len(hosts):
        raise errors.ConfigError(f"--worker_hosts={config.worker_hosts} names a worker twice. Name each once.")
    if config.wait_for_workers and not config.train_dir:
        raise errors.ConfigError("--wait_for_workers needs --train_dir, to go on in.")

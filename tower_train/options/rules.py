"""Rules between the options of a training that no single option can declare. No TensorFlow here."""

import math
import re
from collections.abc import Sequence

from tower_train import errors
from tower_train.options import Options, as_text


def check_config(config: Options) -> None:
    """Raises ConfigError for options of a Config that exclude or need each other."""
    if config.global_batch_size and config.global_batch_size % config.batches_per_step:
        counts = {"workers": config.num_workers, "towers": config.num_towers, "batches each": config.accumulate_steps}
        shares = " x ".join(f"{count} {name}" for name, count in counts.items() if count > 1)
        raise errors.ConfigError(
            f"--global_batch_size={config.global_batch_size} cannot be shared out evenly among {shares}. Choose a "
            f"multiple of {config.batches_per_step}."
        )
    if not re.fullmatch("auto|never|[2-9]|[1-5][0-9]|6[0-4]", config.check_towers):
        raise errors.ConfigError(
            f"--check_towers={config.check_towers[:100]}: it must be auto, never, or a number from 2 to 64."
        )
    needed = {"piecewise": "lr_boundaries", "points": "lr_points"}.get(config.lr_schedule)
    if needed and getattr(config, needed) is None:
        raise errors.ConfigError(f"--lr_schedule={config.lr_schedule} needs --{needed}. Give that too.")
    steps = config.profile_steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        raise errors.ConfigError(
            f"--profile_steps={as_text(steps)}: give the first step and the last, as in --profile_steps=10,20."
        )
    hosts = config.worker_hosts.split(",") if config.worker_hosts is not None else []
    index = config.task_index
    if bool(hosts) != (index is not None) or (hosts and index >= len(hosts)):
        raise errors.ConfigError(
            f"--worker_hosts={config.worker_hosts} and --task_index={index}: give both, the index from 0 to the number "
            "of hosts less one."
        )
    check_hosts(hosts, f"--worker_hosts={config.worker_hosts}")
    if config.lr_points is not None:
        parse_points(config.lr_points)
    if config.keep_hardest is not None:
        parse_hardest(config.keep_hardest)
    if config.elastic is None:
        return
    _, most = parse_elastic(config.elastic)
    if hosts and most > len(hosts):
        raise errors.ConfigError(
            f"--elastic={config.elastic}: there are {len(hosts)} workers. Give a MAX of at most {len(hosts)}."
        )


def parse_hardest(text: str) -> tuple[float, float]:
    """Reads --keep_hardest, such as 2:0.75: the first epoch that keeps this share of the examples; or a
    ConfigError."""
    epoch, _, share = text.partition(":")
    try:
        epoch, share = float(epoch), float(share)
    except ValueError:
        epoch = share = math.nan
    if not (1 <= epoch <= 1e6 and 0 < share <= 1):
        raise errors.ConfigError(
            f"--keep_hardest={text}: it must be EPOCH:SHARE, an epoch from 1 to 1000000, as each example is to be "
            "trained on before, and a share above 0 and at most 1 (all), such as 2:0.75."
        )
    return epoch, share


def parse_points(text: str) -> tuple[tuple[float, float], ...]:
    """Reads --lr_points, such as 0:0.2,0.23:1,1:0.07: (share of the training, value) over points; or a ConfigError."""
    points, before = [], -math.inf
    for part in text.split(","):
        try:
            share, value = map(float, part.split(":"))
        except ValueError:
            share = value = math.nan
        if not (0 <= share <= 1 and share > before and 0 <= value < math.inf):
            raise errors.ConfigError(
                f"--lr_points={text}: {part!r} must be SHARE:VALUE, the share of the training from 0 to 1 and greater "
                "than the one before, the value at least 0, as in 0:0.2,0.23:1,1:0.07."
            )
        points.append((share, value))
        before = share
    return tuple(points)


def parse_elastic(text: str) -> tuple[int, int]:
    """Reads --elastic=MIN:MAX; or a ConfigError."""
    bounds = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text, re.ASCII)
    if not bounds or not 1 <= int(bounds[1]) <= int(bounds[2]):
        raise errors.ConfigError(
            f"--elastic={text[:100]}: it must be MIN:MAX, whole numbers of workers with 1 <= MIN <= MAX, as in 2:4."
        )
    return int(bounds[1]), int(bounds[2])


def check_hosts(hosts: Sequence[str], shown: str) -> None:
    """Raises ConfigError if one is not host:port, or is listed twice; `shown` names the option."""
    for host in hosts:
        port = re.fullmatch(r"[\w.:\[\]-]+:([0-9]{1,5})", host, re.ASCII)
        if not port or not 0 < int(port[1]) < 2**16:
            raise errors.ConfigError(f"{shown}: each must be host:port, which {host[:100]!a} is not.")
    if len(set(hosts)) != len(hosts):
        raise errors.ConfigError(f"{shown} names a worker twice. Name each once.")

"""The devices: those that carry towers, and the host."""

import dataclasses

import tensorflow as tf

from tower_train import errors
from tower_train.config import DeviceOptions

HOST = "/cpu:0"  # where variables, optimizer and moving averages live


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of one worker's towers.

    Attributes:
      towers: device string of each tower, such as '/gpu:1'.
      names: what each tower's device is, for people.
      session_config: the ConfigProto under which these device strings exist.
      num_workers: processes that train together, each with as many towers.
      worker: which of them this is.
    """

    towers: tuple[str, ...]
    names: tuple[str, ...]
    session_config: tf.compat.v1.ConfigProto
    num_workers: int = 1
    worker: int = 0


def place(options: DeviceOptions, gpus_here: list[str] | None = None) -> Devices:
    """Chooses the devices.

    Args:
      options: num_gpus, gpus, device, threads.
      gpus_here: names of this machine's GPUs, for planning for another machine; None: look.

    Raises:
      ConfigError: more GPUs, or others, than there are; the message lists those.
    """
    if gpus_here is None:
        gpus_here = [] if options.device == "cpu" else [gpu.name for gpu in tf.config.list_physical_devices("GPU")]
    proto = tf.compat.v1.ConfigProto(
        allow_soft_placement=True,
        log_device_placement=options.log_device_placement,
        intra_op_parallelism_threads=options.intra_op_threads,
        inter_op_parallelism_threads=options.inter_op_threads,
    )
    if options.device == "cpu" or (not gpus_here and options.device == "auto" and not options.gpus):
        count = options.num_towers
        proto.device_count["CPU"] = count
        proto.device_count["GPU"] = 0
        return Devices(
            tuple(f"/cpu:{i}" for i in range(count)), tuple(f"logical CPU device {i}" for i in range(count)), proto
        )
    wanted = options.gpus or tuple(range(options.num_towers))
    if not set(wanted) <= set(range(len(gpus_here))):
        there = ", ".join(f"{i} ({name})" for i, name in enumerate(gpus_here)) or "none"
        asked = f"--gpus={','.join(map(str, wanted))}" if options.gpus else f"--num_gpus={len(wanted)}"
        raise errors.ConfigError(
            f"{asked}: this machine's GPUs are: {there}. Ask for those, or use --device=cpu for towers on the CPU."
        )
    proto.gpu_options.allow_growth = True
    # Inside the session the chosen GPUs are counted from 0; the others are not touched.
    proto.gpu_options.visible_device_list = ",".join(map(str, wanted))
    return Devices(
        tuple(f"/gpu:{i}" for i in range(len(wanted))), tuple(f"GPU {i} ({gpus_here[i]})" for i in wanted), proto
    )

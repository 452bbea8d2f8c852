"""The TensorFlow server of one worker, and its devices in its sessions."""

import dataclasses

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.task import Task
from tower_train.graph.devices import Devices

v1 = tf.compat.v1

_servers: dict[Task, tf.distribute.Server] = {}  # TensorFlow stops none before the process ends


def start(task: Task, config: v1.ConfigProto) -> tf.distribute.Server:
    """Starts the server of a task, or returns an earlier training's in this process; RunError if it cannot."""
    try:
        if task not in _servers:
            _servers[task] = tf.distribute.Server({"worker": list(task.hosts)}, "worker", task.index, config=config)
        return _servers[task]
    except tf.errors.OpError as error:
        raise errors.RunError(
            f"{task.name(task.index)} cannot be started: its port is in use, or cannot be had ({error.message}). "
            "Stop what uses it, or give another port (--worker_hosts, TF_CONFIG)."
        ) from None


def devices_among_workers(devices: Devices, task: Task) -> Devices:
    """Returns the devices of a process by itself as those of one worker among several."""
    config = v1.ConfigProto()
    config.CopyFrom(devices.session_config)
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    # A session sees this worker's devices only, so that it need not wait for the others.
    config.device_filters.append(f"/job:worker/task:{task.index}")
    return dataclasses.replace(devices, session_config=config, num_workers=len(task.hosts), worker=task.index)

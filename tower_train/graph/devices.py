"""The devices of the towers, and the host."""

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors, host
from tower_train.config import DeviceOptions

HOST = "/cpu:0"  # of the input and the counters, and of the variables unless they are mirrored
_CACHE_BYTES = 2**32  # the most that CUDA keeps; its default is less than all kernels need


class Gpu(NamedTuple):
    """A GPU of this machine."""

    name: str  # of its model, for people
    capability: tuple[int, int] | None = None  # NVIDIA's, (major, minor); None for other makers, or if unknown


def as_gpu(device: tf.config.PhysicalDevice) -> Gpu:
    """Looks a physical GPU up; its name is its number if its model is unknown."""
    details = tf.config.experimental.get_device_details(device)
    return Gpu(details.get("device_name", device.name), details.get("compute_capability"))


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of one worker's towers."""

    towers: tuple[str, ...]  # device string of each tower, such as '/gpu:1'
    names: tuple[str, ...]  # of each tower's device, for people
    session_config: tf.compat.v1.ConfigProto  # under which these device strings exist
    gpus: tuple[Gpu, ...] = ()  # of the towers, in the same order; none for towers on the CPU
    notes: tuple[str, ...] = ()  # lines about them at the beginning of a run
    num_workers: int = 1  # processes that train together, each with as many towers
    worker: int = 0  # index of this one

    def compiles(self, jit_compile: str) -> bool:
        """Returns whether XLA compiles towers here, by the option's value."""
        return jit_compile == "always" or (jit_compile == "auto" and bool(self.gpus))


def place(options: DeviceOptions, gpus_here: list[str | Gpu] | None = None, local: tuple[int, int] = (0, 1)) -> Devices:
    """Chooses the devices. From TensorFlow's first use of a device on, this process sees the chosen GPUs only, and its
    memory on them grows as needed. A GPU that the program has split into logical devices counts as that many.

    Args:
      options: num_gpus, gpus, device.
      gpus_here: this machine's GPUs, or their names, for graphs that are not run; None: look, and set this process up.
      local: (rank, size) of this process among the workers of this machine, which divide its GPUs unless `gpus` says
        which.

    Raises:
      ConfigError: more GPUs, or others, than there are; or none that TensorFlow can use on a machine with an NVIDIA
        driver, unless the CPU is asked for.
    """
    looks, asks_for_cpu = gpus_here is None, options.device == "cpu"
    if looks:
        gpus_here = [] if asks_for_cpu else list(map(as_gpu, _gpus_here()))
    gpus_here = [Gpu(each) if isinstance(each, str) else each for each in gpus_here]
    if asks_for_cpu or (not gpus_here and options.device == "auto" and not options.gpus):
        if looks:
            if not asks_for_cpu:
                _check_driver()
            _hide_others([])
        return _on_cpu(options)
    wanted = options.gpus or _share(options.num_towers, len(gpus_here), *local)
    if not set(wanted) <= set(range(len(gpus_here))):
        there = ", ".join(f"{i} ({gpu.name})" for i, gpu in enumerate(gpus_here)) or "none"
        asked = f"--gpus={','.join(map(str, wanted))}" if options.gpus else f"--num_gpus={len(wanted)}"
        raise errors.ConfigError(
            f"{asked}: this machine's GPUs are: {there}. Ask for those, or use --device=cpu for towers on the CPU."
        )
    # TensorFlow numbers visible GPUs anew, in the machine's order, whatever the order of --gpus
    chosen, seen, proto = tuple(gpus_here[i] for i in wanted), sorted(wanted), _session_config(options)
    if looks:
        seen = _show_only(wanted)
        use_gpus_alike(proto)
    return Devices(
        tuple(f"/gpu:{seen.index(i)}" for i in wanted),
        tuple(f"GPU {i} ({gpu.name})" for i, gpu in zip(wanted, chosen, strict=True)),
        proto,
        chosen,
        tuple(notes_on_new_models(chosen)),
    )


def _share(count: int, here: int, rank: int, size: int) -> tuple[int, ...]:
    """Returns the GPUs of one of a machine's `size` workers, if each wants so many."""
    if count * size <= here:
        return tuple(range(rank * count, (rank + 1) * count))
    if size == 1 or count > here or os.environ.get("CUDA_VISIBLE_DEVICES"):  # Slurm, say, has divided them
        return tuple(range(count))
    if count == 1:  # NCCL does not average between workers of one GPU each
        return (rank % here,)
    raise errors.ConfigError(
        f"--num_gpus={count}: {size} workers of this machine ask for {count} GPUs each, and it has {here}. Give "
        f"--num_gpus={max(1, here // size)}, or fewer workers."
    )


def notes_on_new_models(gpus: Iterable[Gpu]) -> list[str]:
    """Returns a line for each model of GPU that is newer than TensorFlow's binaries: its first start compiles kernels
    for minutes in silence."""
    # binaries for 9.0 run on later ones of 9; for others TensorFlow compiles the PTX in compute_90
    built_for = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])  # such as sm_80, compute_90
    newest_major = max(
        (int(target[1]) for target in map(re.compile(r"\w+_(\d+)\d").fullmatch, built_for) if target), default=99
    )
    return [
        f"*** TensorFlow has no binaries for {gpu.name} (compute capability {'.'.join(map(str, gpu.capability))}): it "
        "compiles each kernel when it is first used, so that the first start takes minutes, up to half an hour. Set "
        f"CUDA_CACHE_MAXSIZE={_CACHE_BYTES}, and later starts find all of them in ~/.nv/ComputeCache."
        for gpu in dict.fromkeys(gpus)
        if gpu.capability and gpu.capability[0] > newest_major
    ]


def _gpus_here() -> list[tf.config.PhysicalDevice]:
    """Returns this machine's GPUs; one that the program has split into logical devices once for each of those."""
    return [
        gpu
        for gpu in tf.config.list_physical_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]


def use_gpus_alike(proto: tf.compat.v1.ConfigProto) -> None:
    """Gives a session the GPUs, their numbers and their memory as TensorFlow has them outside of sessions."""
    # it refuses two numberings in one process (tensorflow#19083), and the first use of a GPU decides on its memory
    outside = tf.__internal__.eager_context.get_config()
    proto.gpu_options.CopyFrom(outside.gpu_options)
    proto.pluggable_device_options.CopyFrom(outside.pluggable_device_options)


def _on_cpu(options: DeviceOptions) -> Devices:
    count, proto = options.num_towers, _session_config(options)
    proto.device_count["CPU"] = count
    proto.device_count["GPU"] = 0
    rewrites = proto.graph_options.rewrite_options
    # rewrites for GPUs, and a second round of all, find nothing to do here and take a third of the start
    rewrites.layout_optimizer, rewrites.memory_optimization = rewrites.OFF, rewrites.NO_MEM_OPT
    rewrites.meta_optimizer_iterations = rewrites.ONE
    return Devices(
        tuple(f"/cpu:{i}" for i in range(count)), tuple(f"logical CPU device {i}" for i in range(count)), proto
    )


def _session_config(options: DeviceOptions) -> tf.compat.v1.ConfigProto:
    proto = tf.compat.v1.ConfigProto(
        allow_soft_placement=True,
        log_device_placement=options.log_device_placement,
    )
    # it sinks operations into branches, but these are lowered before it runs: it only delays the first step
    proto.graph_options.rewrite_options.disable_tfg_optimizer = True
    return proto


def _show_only(wanted: tuple[int, ...]) -> list[int]:
    """Lets this process see the wanted GPUs only, unless TensorFlow has used its devices already; returns the numbers
    of those that it sees. ConfigError if a wanted one is not among them."""
    here = _gpus_here()
    _hide_others(list(dict.fromkeys(here[i] for i in sorted(wanted))))
    visible = tf.config.get_visible_devices("GPU")
    seen = [i for i, gpu in enumerate(here) if gpu in visible]
    if hidden := [i for i in wanted if i not in seen]:
        raise errors.ConfigError(
            f"GPU {', '.join(map(str, hidden))} cannot be used: in this process TensorFlow already began with GPU "
            f"{', '.join(map(str, seen)) or 'none'}. Train on others in another process."
        )
    return seen


def _hide_others(visible: list[tf.config.PhysicalDevice]) -> None:
    """Hides all other GPUs from this process, and lets memory grow; nothing once TensorFlow has used a device."""
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices(visible, "GPU")
    let_memory_grow(visible)


def let_memory_grow(devices: list[tf.config.PhysicalDevice]) -> None:
    """Keeps TensorFlow from taking all memory of GPUs at once, if it has not used them yet."""
    # whoever splits a GPU into logical devices has given them their memory; TensorFlow then lets none grow
    if any(tf.config.get_logical_device_configuration(gpu) for gpu in devices):
        return
    for gpu in devices:
        with contextlib.suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(gpu, True)


def _check_driver() -> None:
    """Raises ConfigError on a machine with an NVIDIA driver: a silent run on its CPU would waste it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not (driver := host.nvidia_driver()):
        return
    if importlib.util.find_spec("nvidia"):
        lacking = "Its own remarks above say why"
    else:
        lacking = "CUDA's libraries are not installed: pip install 'tower_train[gpu]' brings them"
    raise errors.ConfigError(
        f"this machine has an NVIDIA driver ({driver}), but TensorFlow finds no GPU that it can use. "
        f"{lacking}. For towers on the CPU say --device=cpu."
    )


def refuse_auto_jit() -> None:
    """Raises ConfigError for a TF_XLA_FLAGS that compiles what draws random numbers."""
    flags = os.environ.get("TF_XLA_FLAGS", "")
    if "tf_xla_auto_jit" in flags:
        raise errors.ConfigError(
            f"TF_XLA_FLAGS={flags!a:.100}: tf_xla_auto_jit changes random numbers, and so the training, in silence. "
            "Leave it out, and give --jit_compile=always."
        )


def choose_kernels(deterministic: bool, tensor_float_32: bool | None) -> None:
    """Chooses kernels for all that this process builds and runs from now on.

    Args:
      deterministic: GPUs repeat to the bit, until the process ends.
      tensor_float_32: GPUs may round the factors of float32 products to 10 bits, which is several times as fast (Ampere
        and later); None leaves TensorFlow's setting, by default True.
    """
    if tensor_float_32 is not None:
        tf.config.experimental.enable_tensor_float_32_execution(tensor_float_32)
    if deterministic:
        tf.config.experimental.enable_op_determinism()

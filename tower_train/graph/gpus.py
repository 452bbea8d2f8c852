"""Properties of GPUs, and the check that this TensorFlow has binaries for them."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors

Capability = tuple[int, int]
_CACHE_BYTES = 2**32  # the most that CUDA keeps; its default is less than all kernels need


class Gpu(NamedTuple):
    """A GPU of this machine.

    Attributes:
      name: of its model, for people.
      capability: NVIDIA's compute capability, (major, minor); None for other makers, or if unknown.
    """

    name: str
    capability: Capability | None = None


def about(device: tf.config.PhysicalDevice) -> Gpu:
    """Looks a physical GPU up; its name is its number if its model is unknown."""
    details = tf.config.experimental.get_device_details(device)
    return Gpu(details.get("device_name", device.name), details.get("compute_capability"))


def check_binaries(gpus: Iterable[Gpu], built_for: Sequence[str] | None = None) -> list[str]:
    """Finds the GPUs for which TensorFlow must compile its kernels first.

    Args:
      gpus: those that are used.
      built_for: targets of TensorFlow's build, such as ['sm_80', 'compute_90']; None: of this one. sm_80 is a binary
        for 8.0 and later ones of 8; compute_90 is one for 9.0, and also PTX, which is compiled for all later ones
        (TensorFlow's configure.py).

    Returns:
      A line per model, for before the first step.

    Raises:
      ConfigError: TensorFlow cannot use one of them at all.
    """
    if built_for is None:
        built_for = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    targets = [re.fullmatch(r"(sm|compute)_(\d+)(\d)", each) for each in built_for]
    built = [(each[1], (int(each[2]), int(each[3]))) for each in targets if each]
    notes = {}
    for gpu in gpus:
        capability = gpu.capability
        if capability is None or not built or any(capability[0] == of[0] and capability >= of for _, of in built):
            continue
        name = f"{gpu.name} (compute capability {_text(capability)})"
        if not any(kind == "compute" and capability >= of for kind, of in built):
            raise errors.ConfigError(
                f"{gpu.name} has compute capability {_text(capability)}, for which this TensorFlow was not built: it "
                f"runs on {', '.join(_text(of) for _, of in built)} and later ones. Use other GPUs (--gpus), an older "
                "TensorFlow, or --device=cpu."
            )
        notes[gpu] = (
            f"*** TensorFlow has no binaries for {name}: it compiles each kernel "
            "when it is first used, so that the first start takes minutes, up to half an hour. Set "
            f"CUDA_CACHE_MAXSIZE={_CACHE_BYTES}, and later starts find all of them in ~/.nv/ComputeCache."
        )
    return list(notes.values())


def _text(capability: Capability) -> str:
    return ".".join(map(str, capability))

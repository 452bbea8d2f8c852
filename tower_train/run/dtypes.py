"""--dtype=auto: bfloat16 where the devices of the towers have instructions for it, else float32."""

import dataclasses

import tensorflow as tf

from tower_train import host
from tower_train.config import Config

# As Linux calls them: of x86 (AVX-512 or AMX), and of ARM.
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
_LEAST_CAPABILITY = (8, 0)  # of an NVIDIA GPU; the first with bfloat16 is Ampere


def resolve(config: Config, before: dict) -> tuple[Config, list[str]]:
    """Puts a dtype in the place of auto.

    Args:
      config: of this start.
      before: run.json of the starts before, whose dtype the run stays with; else empty.

    Returns:
      The config, and a line that says what was chosen and why; none where there was nothing to choose.
    """
    if config.dtype != "auto":
        return config, []
    if began_with := before.get("config", {}).get("dtype"):
        dtype, why = began_with, "as the run began"
    else:
        gpus = [] if config.device == "cpu" else tf.config.list_physical_devices("GPU")
        used = [gpus[i] for i in config.gpus or range(config.num_towers)] if gpus else []
        dtype, why = of_gpus([_about(gpu) for gpu in used]) if used else of_processor()
    return dataclasses.replace(config, dtype=dtype), [f"dtype: {dtype}, {why}"]


def of_processor() -> tuple[str, str]:
    """(dtype, why) for this machine's processor; all of its cores must have the instructions."""
    cores = [set(flags.split()) for flags in host.about_cores("flags", "Features")]  # of x86 and of ARM
    if not cores:
        return "float32", f"since {host.CPUINFO} does not tell this processor's instructions"
    if found := sorted(_INSTRUCTIONS.intersection(*cores)):
        return "bfloat16", f"since this processor has instructions for it ({', '.join(found)})"
    return "float32", "since this processor has no bfloat16 instructions"


def of_gpus(gpus: list[tuple[str, tuple[int, int] | None]]) -> tuple[str, str]:
    """(dtype, why) for GPUs, from the name and the compute capability of each, None where it is not known."""
    for name, capability in gpus:
        if capability is None:
            return "float32", f"since the compute capability of {name} is not known"
        if capability < _LEAST_CAPABILITY:
            known = ".".join(map(str, capability))
            return "float32", f"since {name} has no bfloat16 arithmetic (compute capability {known}, below 8.0)"
    return "bfloat16", f"since {gpus[0][0] if len(gpus) == 1 else 'every GPU used'} has arithmetic for it"


def _about(gpu) -> tuple[str, tuple[int, int] | None]:
    details = tf.config.experimental.get_device_details(gpu)
    return details.get("device_name", gpu.name), details.get("compute_capability")

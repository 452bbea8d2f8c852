"""--dtype=auto: bfloat16 if the towers' devices have fast instructions for it; else float16 on GPUs made for it;
else float32."""

from collections.abc import Sequence

from tower_train import host
from tower_train.graph.gpus import Gpu

_AMPERE, _VOLTA = (8, 0), (7, 0)  # compute capabilities of the first NVIDIA GPUs made for bfloat16, and for float16
_SLOW = "--dtype=float16 is for GPUs: on a processor its convolutions can take hundreds of times as long as in float32."


def resolve(dtype: str, began_with: str | None, gpus: Sequence[Gpu]) -> tuple[str, list[str]]:
    """Replaces auto by a dtype.

    Args:
      dtype: --dtype of this start.
      began_with: the dtype of earlier starts, which the run keeps; None for a new run.
      gpus: those that carry towers; none for towers on the CPU.

    Returns:
      The dtype, and a line about the choice and its reason, or that it suits GPUs only, if there is one.
    """
    if dtype != "auto":
        return dtype, [f"*** {_SLOW}"] if dtype == "float16" and not gpus else []
    if began_with:
        dtype, why = began_with, "as the run began"
    else:
        dtype, why = of_gpus(gpus) if gpus else of_processor()
    return dtype, [f"dtype: {dtype}, {why}"]


def of_processor() -> tuple[str, str]:
    """Returns (dtype, reason) for this machine's processor."""
    instructions = host.bfloat16_instructions()
    if instructions is None:
        return "float32", f"since {host.CPUINFO} does not tell this processor's instructions"
    if instructions:
        return "bfloat16", f"since this processor has fast instructions for it ({instructions})"
    return "float32", "since this processor has no fast bfloat16 instructions"


def of_gpus(gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Returns (dtype, reason) for GPUs."""
    for name, capability in gpus:
        if capability is None:
            return "float32", f"since the compute capability of {name} is not known"
    name, capability = min(gpus, key=lambda gpu: gpu.capability)
    if capability >= _AMPERE:
        return "bfloat16", f"since {name if len(gpus) == 1 else 'every GPU used'} has arithmetic for it"
    dtype, lacking, least = (
        ("float16", "bfloat16 arithmetic", _AMPERE)
        if capability >= _VOLTA
        else ("float32", "fast arithmetic in float16", _VOLTA)
    )
    known, least = (".".join(map(str, each)) for each in (capability, least))
    return dtype, f"since {name} has no {lacking} (compute capability {known}, below {least})"

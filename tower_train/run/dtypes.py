"""--dtype=auto: bfloat16 if the towers' devices have fast instructions for it; else float16 on GPUs made for it;
else float32."""

from collections.abc import Callable, Mapping, Sequence

from tower_train import host
from tower_train.graph.gpus import Gpu

# As Linux calls them: of x86 (AVX-512 or AMX), and of ARM.
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
_AMPERE, _VOLTA = (8, 0), (7, 0)  # compute capabilities of the first NVIDIA GPUs made for bfloat16, and for float16
_TOO_SLOW = 1.2  # times as long as in float32: what bfloat16 saves elsewhere does not make up for more
_SLOW = "--dtype=float16 is for GPUs: on a processor its convolutions can take hundreds of times as long as in float32."


def resolve(
    dtype: str, began_with: str | None, gpus: Sequence[Gpu], time_products: Callable[[], Mapping[str, float]] | None
) -> tuple[str, list[str]]:
    """Replaces auto by a dtype.

    Args:
      dtype: --dtype of this start.
      began_with: the dtype of earlier starts, which the run keeps; None for a new run.
      gpus: those that carry towers; none for towers on the CPU.
      time_products: {dtype: seconds} of one product of matrices on the CPU, in float32 and in bfloat16; called only if
        that decides. None: slow instructions for bfloat16 are used too.

    Returns:
      The dtype, and a line about the choice and its reason, or that it suits GPUs only, if there is one.
    """
    if dtype != "auto":
        return dtype, [f"*** {_SLOW}"] if dtype == "float16" and not gpus else []
    if began_with:
        dtype, why = began_with, "as the run began"
    else:
        dtype, why = of_gpus(gpus) if gpus else of_processor()
        if dtype == "bfloat16" and not gpus and time_products:
            seconds = time_products()
            ratio = seconds["bfloat16"] / seconds["float32"]
            if ratio > _TOO_SLOW:
                dtype, why = "float32", f"since a product of matrices in bfloat16 takes {ratio:.1f} times as long here"
    return dtype, [f"dtype: {dtype}, {why}"]


def of_processor() -> tuple[str, str]:
    """Returns (dtype, reason) for this machine's processor, all cores of which must have the instructions."""
    cores = [set(flags.split()) for flags in host.about_cores("flags", "Features")]  # of x86 and of ARM
    if not cores:
        return "float32", f"since {host.CPUINFO} does not tell this processor's instructions"
    if instructions := sorted(_INSTRUCTIONS.intersection(*cores)):
        return "bfloat16", f"since this processor has instructions for it ({', '.join(instructions)})"
    return "float32", "since this processor has no bfloat16 instructions"


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

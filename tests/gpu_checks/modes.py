"""The ways to train: where the variables live, how gradients are averaged, and each dtype's speed."""

_SECS_EACH, _QUICK_SECS = 2.0, 0.2
_BATCH = 512  # of a tower
_SECS_FOR_ONE = 15  # building, warming up and measuring
_PART_MEGABYTES = 8000


def variables_and_reduces(findings, settings):
    """Times each in float32; whether they train the same is for `towers` and `cards`."""
    if settings.quick:
        findings.unchecked("speed of each place of the variables", "--quick")
        return
    from gpu_checks import trials

    count = len(trials.gpus())
    kinds = {name: {"variable_update": name} for name in ("cpu",)}
    for reduce in trials.choices("all_reduce"):
        kinds[f"mirrored, {reduce}"] = {"variable_update": "mirrored", "all_reduce": reduce}
    if count < 2:
        del kinds["mirrored, nccl"]
        findings.unchecked("mirrored, nccl", f"it needs two GPUs, and there {'is one' if count else 'is none'}")
    towers, where = trials.places(_PART_MEGABYTES)
    batch = _BATCH if count else 16
    workload, examples, _ = trials.fixed("convnet", batch, settings)
    for name, kind in kinds.items():
        if settings.left() < _SECS_FOR_ONE:
            findings.unchecked(f"convnet on {where}, {name}", "no time was left")
            continue
        with findings.attempt(f"convnet on {where}, {name}"):
            rate = trials.examples_per_sec(workload, examples, _SECS_EACH, num_gpus=towers, batch_size=batch, **kind)
            findings.measured(f"convnet on {where}, {name}, float32", examples_per_sec=rate)


def dtypes(findings, settings):
    """Examples a second of one tower on one batch, so that nothing waits for input."""
    from gpu_checks import trials

    seconds = _QUICK_SECS if settings.quick else _SECS_EACH
    batch = _BATCH if trials.gpus() else 16
    if not trials.gpus():
        findings.unchecked("speed of dtypes on a GPU", "there is none; on the CPU instead")
    for model in ("convnet",) if settings.quick else ("convnet", "resnet20"):
        workload, examples, flops = trials.fixed(model, batch, settings)
        for dtype in ("float32",) if settings.quick else (each for each in trials.dtypes() if each != "float64"):
            both = dtype == "float32" and trials.gpus()
            for tensor_float_32 in (True, False) if both else (True,):
                name = f"{model}, {dtype}{'' if not both else ', tf32' if tensor_float_32 else ', no tf32'}"
                if settings.left() < _SECS_FOR_ONE:
                    findings.unchecked(f"speed of {name}", "no time was left")
                    continue
                with findings.attempt(f"speed of {name}"):
                    rate = trials.examples_per_sec(
                        workload, examples, seconds, tensor_float_32, num_gpus=1, batch_size=batch, dtype=dtype
                    )
                    findings.measured(
                        f"{name}, one tower of {batch} examples", examples_per_sec=rate, gigaflops=rate * flops / 1e9
                    )

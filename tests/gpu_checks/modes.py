"""The ways to train: where the variables live, how gradients are averaged, and each dtype's speed."""

_SECS_EACH, _QUICK_SECS = 2.0, 0.2
_BATCH = 512  # of a tower
_SECS_FOR_ONE = 15  # building, warming up and measuring
_PART_MEGABYTES = 8000


def variables_and_reduces(findings, settings):
    """All of them are the reference in float64 to 1e-9, and how fast each is in float32."""
    if settings.quick:
        findings.unchecked("speed of each place of the variables", "--quick")
        return
    from gpu_checks import trials

    on_gpus, towers = bool(trials.gpus()), max(2, len(trials.gpus()))
    kinds = {name: {"variable_update": name} for name in trials.choices("variable_update") if name != "mirrored"}
    for reduce in trials.choices("all_reduce"):
        kinds[f"mirrored, {reduce}"] = {"variable_update": "mirrored", "all_reduce": reduce}
    if len(trials.gpus()) < 2:
        kinds.pop("mirrored, nccl", None)
        findings.unchecked("mirrored, nccl", f"it needs two GPUs, and there {'is one' if on_gpus else 'is none'}")
    if len(trials.gpus()) == 1:
        trials.split_first_gpu(towers, _PART_MEGABYTES)
    batch = _BATCH if on_gpus else 16
    workload, examples, _ = trials.fixed("convnet", batch, settings)
    where = f"{towers} {'parts of one GPU' if len(trials.gpus()) == 1 else trials.cards()}"
    expected = None
    for name, kind in kinds.items():
        if settings.left() < _SECS_FOR_ONE:
            findings.unchecked(f"convnet on {where}, {name}", "no time was left")
            continue
        with findings.attempt(f"convnet on {where}, {name}"):
            exact = dict(dtype="float64", num_gpus=towers, batch_size=8, learning_rate=0.01)
            values = trials.variables_after(5, "convnet", settings.data_dir, **exact, **kind)
            expected = expected or values
            rate = trials.examples_per_sec(workload, examples, _SECS_EACH, num_gpus=towers, batch_size=batch, **kind)
            difference = trials.greatest_difference(values, expected)
            findings.check(
                difference <= trials.TOLERANCE, f"convnet on {where}, {name}: equals cpu in float64",
                greatest_relative_difference=difference, examples_per_sec_in_float32=rate,
            )  # fmt: skip


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
                        f"{name}, one tower of {batch} examples", examples_per_sec=rate,
                        **({"gigaflops": rate * flops / 1e9} if flops else {}),
                    )  # fmt: skip

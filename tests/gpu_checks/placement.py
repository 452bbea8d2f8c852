"""Every kind of training as TensorFlow places it on GPUs, real ones or, without any, such that cannot compute."""

import itertools
import os
import pathlib

_ENOUGH_SECS = 25  # for another case
_NETWORKS = ("convnet", "cifar10_94", "resnet20", "minigooglenet")


def check(findings, settings):
    """Each case's executors are made without soft placement, which takes a kernel for every operation on its device."""
    if settings.quick:
        findings.unchecked("kernels and traffic of each kind of training", "--quick; tests/gpus has them too")
        return
    dumps = pathlib.Path(settings.scratch, "dumps")
    dumps.mkdir()
    # TensorFlow reads these when it is loaded, which `trials` does.
    os.environ |= {"FAKE_GPUS": "4", "TF_DUMP_GRAPH_PREFIX": str(dumps), "TF_CPP_VMODULE": "placer=3"}
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and not settings.plugin:
        findings.unchecked("kernels and traffic of each kind of training", "there are no GPUs, and no g++ to fake some")
        return
    if not gpus:
        from tensorflow.python.framework import load_library

        load_library.load_pluggable_device_library(settings.plugin)
        findings.unchecked("placement on real GPUs", "there are none; on fake ones instead")
    chosen = [2, 0]
    if gpus:
        chosen = [1, 0]
        if len(gpus) == 1:
            from gpu_checks import trials

            trials.split_first_gpu(2, 2000)
    _check_cases(tf, findings, settings, dumps, chosen)


def cases() -> list[dict]:
    """Options of Config for every network, place of the variables, all-reduce and dtype."""
    from gpu_checks import trials

    kinds = [{}] + [{"variable_update": "mirrored", "all_reduce": kind} for kind in trials.choices("all_reduce")]
    found = [
        {"model": model, "dtype": dtype} | kind
        for model, dtype, kind in itertools.product(_NETWORKS, trials.dtypes(), kinds)
    ]
    # The most different ones first: time may not suffice for all.
    return sorted(found, key=lambda case: (case["dtype"] != "float32") + (case["model"] != "convnet"))


def _check_cases(tf, findings, settings, dumps, chosen):
    import on_fake_gpus

    waiting, number = cases(), 0
    total = len(waiting)
    while waiting and settings.left() > _ENOUGH_SECS:
        case, number = waiting.pop(0), number + 1
        with findings.attempt(f"placement of {_named(case)}"):
            about = on_fake_gpus.about(tf, case | {"gpus": chosen}, dumps)
            findings.check(
                about["session"] == about["context"], f"{_named(case)}: a kernel for each operation, one configuration",
                **{f"{way}, bytes a step": count for way, count in sorted((about["crossing"] or {}).items())},
            )  # fmt: skip
    if waiting:
        findings.unchecked(f"{len(waiting)} of {total} cases", "no time was left")


def _named(case: dict) -> str:
    return ", ".join(map(str, case.values()))

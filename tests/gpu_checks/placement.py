"""Every kind of training as TensorFlow places it on GPUs, real ones or, without any, such that cannot compute."""

import itertools
import os
import pathlib

_ENOUGH_SECS = 15  # for another case
_NETWORKS = ("convnet", "cifar10_94", "resnet20", "minigooglenet")
_PART_MEGABYTES = 2000


def check(findings, settings):
    """Each case's executors are made without soft placement, which takes a kernel for every operation on its device."""
    if settings.quick:
        findings.unchecked("kernels and traffic of each kind of training", "--quick; tests/gpus has them too")
        return
    dumps = pathlib.Path(settings.scratch, "dumps")
    dumps.mkdir()
    # TensorFlow reads these when it is loaded.
    os.environ |= {"FAKE_GPUS": "4", "TF_DUMP_GRAPH_PREFIX": str(dumps), "TF_CPP_VMODULE": "placer=3"}
    from gpu_checks import trials

    count, chosen = len(trials.gpus()), (1, 0)
    if not count:
        if not settings.plugin:
            findings.unchecked("kernels and traffic", "there are no GPUs, and no g++ to fake some")
            return
        from tensorflow.python.framework import load_library

        load_library.load_pluggable_device_library(settings.plugin)
        findings.unchecked("placement on real GPUs", "there are none; on fake ones instead")
        chosen = (2, 0)
    elif count == 1:
        trials.split_first_gpu(2, _PART_MEGABYTES)
    _check_cases(findings, settings, dumps, chosen)


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


def _check_cases(findings, settings, dumps, chosen):
    waiting = cases()
    total = len(waiting)
    while waiting and settings.left() > _ENOUGH_SECS:
        case = waiting.pop(0)
        with findings.attempt(f"placement of {_named(case)}"):
            if case["dtype"] == "float64":
                _check_by_registry(findings, case, chosen)
            else:
                _check_executors(findings, case, chosen, dumps)
    if waiting:
        findings.unchecked(f"{len(waiting)} of {total} cases", "no time was left")


def _check_executors(findings, case, chosen, dumps):
    import on_fake_gpus
    import tensorflow as tf

    about = on_fake_gpus.about(tf, case | {"gpus": chosen}, dumps)
    crossing = {f"{way}, bytes a step": count for way, count in sorted((about["crossing"] or {}).items())}
    findings.check(about["session"] == about["context"], f"{_named(case)}: a kernel for each operation", **crossing)


def _check_by_registry(findings, case, chosen):
    """In float64 soft placement moves an operation to the CPU, so that executors tell nothing."""
    import kernel_registry

    import cifar10
    from tower_train.graph import devices, training
    from tower_train.workload import DataRequest

    options = {name: value for name, value in case.items() if name != "model"}
    workload = cifar10.WORKLOAD.with_options({"model": case["model"]})
    config = workload.config(gpus=chosen, batch_size=4, summary_every_steps=0, **options)
    examples = workload.examples(DataRequest("train", "generated"))
    built = training.training_graph(workload, examples, config, devices.place(config))
    lacking = kernel_registry.lacking(kernel_registry.nodes_on_gpus(built.graph.as_graph_def()))
    findings.check(lacking <= kernel_registry.EXCEPTIONS.keys(), f"{_named(case)}: kernels by the registry",
                   on_the_cpu=sorted({op for op, _ in lacking}))  # fmt: skip


def _named(case: dict) -> str:
    return ", ".join(map(str, case.values()))

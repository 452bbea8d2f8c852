"""Every kind of training as TensorFlow places it on GPUs, real ones or, without any, fake ones that cannot compute."""

import os
import pathlib

_ENOUGH_SECS = 15  # for another case
_LEFT_OUT = ("MobileNet", "resnet56", "resnet8", "googlenet")  # slow to build, or parts of others
_PART_MEGABYTES = 2000


def check(findings, settings):
    """Each case's executors are made without soft placement, which takes a kernel for every operation on its device."""
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


def cases() -> dict[str, dict]:
    """{name: case} of every network, place of the variables, all-reduce and dtype, and of the fronts."""
    import gpu_graphs

    found = {name: case for name, case in gpu_graphs.everything().items() if case.get("network") not in _LEFT_OUT}
    # The most different ones first: time may not suffice for all.
    return dict(sorted(found.items(), key=lambda item: ("float32" not in item[0]) + ("convnet" not in item[0])))


def _check_cases(findings, settings, dumps, chosen):
    import fake_gpus

    waiting = list(cases().items())
    total = len(waiting)
    while waiting and settings.left() > _ENOUGH_SECS:
        name, case = waiting.pop(0)
        with findings.attempt(f"placement of {name}"):
            about = fake_gpus.audit(case if "front" in case else case | {"gpus": chosen}, dumps)
            crossing = {f"{way}, bytes a step": count for way, count in sorted((about["crossing"] or {}).items())}
            findings.check(
                not about["lacking"] and not about["refused"] and about["session"] == about["context"],
                f"{name}: a kernel for each operation", lacking=about["lacking"], **crossing,
            )  # fmt: skip
    findings.measured("cases that were placed", count=total - len(waiting), of=total)
    if waiting:
        findings.unchecked(f"{len(waiting)} of {total} cases", "no time was left")

"""Every kind of training as TensorFlow places it on GPUs."""

import os
import pathlib

_ENOUGH_SECS = 15  # for another case
_LEFT_OUT = ("MobileNet", "resnet56", "resnet8", "googlenet")  # slow to build, or parts of others
_PART_MEGABYTES = 2000


def check(findings, settings):
    """Each case's executors are made without soft placement, which takes a kernel for every operation on its device."""
    dumps = pathlib.Path(settings.scratch, "dumps")
    dumps.mkdir()
    os.environ |= {"TF_DUMP_GRAPH_PREFIX": str(dumps), "TF_CPP_VMODULE": "placer=3"}  # read when TensorFlow is loaded
    import fake_gpus
    import gpu_graphs

    from gpu_checks import trials

    if not trials.gpus():
        findings.unchecked("kernels and traffic", "there are no GPUs; tests/gpus has some that cannot compute")
        return
    if len(trials.gpus()) == 1:
        trials.split_first_gpu(2, _PART_MEGABYTES)
    found = {name: case for name, case in gpu_graphs.everything().items() if case.get("network") not in _LEFT_OUT}
    # The most different ones first: time may not suffice for all.
    waiting = sorted(found.items(), key=lambda item: ("float32" not in item[0]) + ("convnet" not in item[0]))
    while waiting and settings.left() > _ENOUGH_SECS:
        name, case = waiting.pop(0)
        with findings.attempt(f"placement of {name}"):
            about = fake_gpus.audit(case if "front" in case else case | {"gpus": (1, 0)}, dumps)
            crossing = {f"{way}, bytes a step": count for way, count in sorted((about["crossing"] or {}).items())}
            findings.check(
                not about["lacking"] and not about["refused"] and about["session"] == about["context"],
                f"{name}: a kernel for each operation", lacking=about["lacking"], **crossing,
            )  # fmt: skip
    if waiting:
        findings.unchecked(f"{len(waiting)} of {len(found)} cases", "no time was left")

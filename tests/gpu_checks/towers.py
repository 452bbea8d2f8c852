"""N towers against one, in float64: on the parts of one card, and on several cards."""

_PARTS, _PART_MEGABYTES = 4, 4000
_STEPS, _GLOBAL_BATCH = 10, 24
_SECS_EACH = 12  # about what one comparison may take


def on_one_card(findings, settings):
    from gpu_checks import trials

    where = "parts of one GPU" if trials.gpus() else "logical CPU devices"
    if trials.gpus():
        trials.split_first_gpu(_PARTS, _PART_MEGABYTES)
    else:
        findings.unchecked("several towers on one GPU", "there is no GPU; on logical CPU devices instead")
    _compare(findings, settings, where, (2, _PARTS), ("add_n", "collective"))


def on_several_cards(findings, settings):
    from gpu_checks import trials

    count = trials.power_of_two(min(len(trials.gpus()), 8))  # a divisor of the global batch
    if count < 2:
        findings.unchecked("several GPUs against one", f"there {'is one' if count else 'is none'}")
        return
    _compare(findings, settings, "GPUs", sorted({2, count}), trials.choices("all_reduce"))


def _compare(findings, settings, where, counts, reduces):
    from gpu_checks import trials

    kinds = {"cpu": {}} | {f"mirrored, {kind}": {"variable_update": "mirrored", "all_reduce": kind} for kind in reduces}
    if settings.quick:
        counts, kinds = counts[-1:], {name: kinds[name] for name in ("cpu", "mirrored, add_n")}
    options = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, seed=1)
    # All devices are placed before the first one is used.
    for model in ("toy",) if settings.quick else ("toy", "convnet"):
        one = None
        for count in reversed(counts):
            for name, kind in kinds.items():
                what = f"{model}: {count} towers on {where}, {name}, are one after {_STEPS} steps"
                if settings.left() < _SECS_EACH:
                    findings.unchecked(what, "no time was left")
                    continue
                with findings.attempt(what):
                    batch = _GLOBAL_BATCH // count
                    many = trials.variables_after(
                        _STEPS, model, settings.data_dir, num_gpus=count, batch_size=batch, **options, **kind
                    )
                    if one is None:
                        one = trials.variables_after(
                            _STEPS, model, settings.data_dir, num_gpus=1, batch_size=_GLOBAL_BATCH, **options
                        )
                    difference = trials.greatest_difference(many, one)
                    findings.check(difference <= trials.TOLERANCE, what, greatest_relative_difference=difference)

"""A profile of some steps, and from it the share of these steps in which each card did nothing."""

import dataclasses
import pathlib

_FIRST, _LAST = 40, 60
_HOST, _STEP = "/host:CPU", "train"  # as ProfileHook marks steps
_STREAM = "Stream"  # a GPU's lines of kernels and copies; others are derived from them
_COPIES = ("memcpy", "memset")


@dataclasses.dataclass(frozen=True)
class Busy:
    """One GPU during the profiled steps: shares of their time from 0 to 1, and the kernels' number.

    Attributes:
      idle: neither computing nor copying.
      computing: at least one kernel at work.
    """

    idle: float
    computing: float
    kernels: int


def check(findings, settings):
    from gpu_checks import trials

    count = len(trials.gpus())
    if not count:
        findings.unchecked("idle time of GPUs", "there is none; the reader is tried on the CPU's profile")
    first, last = (3, 6) if settings.quick or not count else (_FIRST, _LAST)
    model, batch = ("toy", 8) if settings.quick else ("convnet", 512 if count else 16)
    for towers in sorted({1, max(1, trials.power_of_two(count))}, reverse=True):  # the first decides on the GPUs seen
        name = f"{model}, {towers} tower{'s' * (towers > 1)}"
        with findings.attempt(f"a profile of {name}"):
            folder = pathlib.Path(settings.scratch, f"profile-{towers}")
            _train(trials, settings, folder, model, num_gpus=towers, batch_size=batch, steps=(first, last))
            space = read(folder)
            window = steps_window(space)
            step_ms = (window[1] - window[0]) / 1e9 / (last - first + 1)
            findings.check(
                step_ms > 0, f"{name}: a profile of {last - first + 1} steps", ms_a_step=step_ms,
                planes=[plane.name for plane in space.planes],
            )  # fmt: skip
            busy = busy_gpus(space)
            for plane, found in busy.items():
                numbers = dict(idle_share=found.idle, computing_share=found.computing,
                               kernels_a_step=found.kernels / (last - first + 1))  # fmt: skip
                if found.kernels:
                    findings.measured(f"{name}, {plane}: kernels within the steps", **numbers)
            traced = sum(found.kernels > 0 for found in busy.values())
            if count and traced < towers:
                findings.unchecked(f"{name}: idle time of {towers - traced} of {towers} GPUs",
                                   "the profile has no kernels of them: CUPTI is missing or not allowed")  # fmt: skip


def _train(trials, settings, folder, model, num_gpus, batch_size, steps):
    """Trains in this process, as every option for it is the same as the command's."""
    import tower_train

    workload, _ = trials.workload_and_examples(model, settings.data_dir)
    dataset = {} if model == "toy" else {"dataset": "generated", "data_dir": settings.data_dir}
    config = workload.config(
        train_dir=str(folder), num_gpus=num_gpus, batch_size=batch_size, max_steps=steps[1] + 2, profile_steps=steps,
        summary_every_steps=0, check_data=False, **dataset,
    )  # fmt: skip
    tower_train.train(workload, config)


def read(train_dir: pathlib.Path):
    """The XSpace of the only profile of a run."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    [path] = train_dir.glob("plugins/profile/*/*.xplane.pb")
    return xplane_pb2.XSpace.FromString(path.read_bytes())


def steps_window(space) -> tuple[int, int]:
    """The beginning of the first marked step and the end of the last, in picoseconds."""
    times = [
        time for plane in space.planes if plane.name == _HOST
        for line in plane.lines for name, *time in _events(plane, line) if name == _STEP
    ]  # fmt: skip
    if not times:
        raise RuntimeError("the profile has no marked step")
    return min(start for start, _ in times), max(end for _, end in times)


def busy_gpus(space) -> dict[str, Busy]:
    """{GPU's plane: how busy it was} during the marked steps."""
    window, found = steps_window(space), {}
    for plane in space.planes:
        if plane.name.startswith("/device:GPU:"):
            lines = [line for line in plane.lines if line.name.startswith(_STREAM)]
            events = [event for line in lines for event in _events(plane, line)]
            kernels = [event for event in events if not event[0].lower().startswith(_COPIES)]
            shares = [covered([event[1:] for event in each], window) / (window[1] - window[0])
                      for each in (events, kernels)]  # fmt: skip
            within = sum(start < window[1] and end > window[0] for _, start, end in kernels)
            found[plane.name] = Busy(1 - shares[0], shares[1], within)
    return found


def covered(intervals, window: tuple[int, int]) -> int:
    """The length of the union of intervals (start, end) within a window."""
    total, reached = 0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        total += max(0, end - start)
        reached = max(reached, end)
    return total


def _events(plane, line):
    """(name, start, end) of each event of a line, in picoseconds of the profile's clock."""
    for event in line.events:
        start = line.timestamp_ns * 1000 + event.offset_ps
        yield plane.event_metadata[event.metadata_id].name, start, start + event.duration_ps

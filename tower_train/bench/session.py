"""What every form of the benchmark begins with: where results go, what is there to measure, how a side is started."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator

from tower_train import errors
from tower_train.bench import machine
from tower_train.bench.options import BenchmarkOptions
from tower_train.bench.processes import Worker
from tower_train.bench.progress import Progress
from tower_train.bench.systems import System

_FIXED = "fixed"  # the file with the distorted batch


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of the benchmark.

    Attributes:
      options: what the user said.
      out: the directory of the results.
      progress: the bar.
      machine: `machine.describe` when it began.
      about: what `sides.describe` found out about workload, data and devices.
    """

    options: BenchmarkOptions
    out: pathlib.Path
    progress: Progress
    machine: dict
    about: dict
    _common: dict
    _places: Iterator[pathlib.Path]

    def start(self, side: System) -> Worker:
        """Starts a side's process, with an empty place for its files."""
        place = next(self._places)
        own = {"name": side.name, "kind": side.kind, "batch_size": side.batch_size, "scratch": str(place)}
        return Worker(side.name, self._common | side.settings | own, place, self.options.timeout_secs)

    def write(self, name: str, content: dict) -> pathlib.Path:
        """Writes results, with what they were measured on, into NAME.json; returns its path."""
        path = self.out / f"{name}.json"
        where = {"options": dataclasses.asdict(self.options), "machine": self.machine, "about": self.about}
        path.write_text(json.dumps(where | content, indent=1) + "\n")
        return path


def results_directory(options: BenchmarkOptions) -> pathlib.Path:
    """Makes the directory of the results.

    Raises:
      ConfigError: it cannot be made.
    """
    out = pathlib.Path(options.out or f"runs/benchmark-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ConfigError(f"--out={out} cannot be made ({error.strerror}). Give a directory that can.") from None
    return out


@contextlib.contextmanager
def opened(options: BenchmarkOptions) -> Iterator[Session]:
    """Finds out what there is to measure; on leaving, temporary files go.

    Raises:
      ConfigError: the directory for results cannot be made.
      SideError: the data or the workload cannot be used.
    """
    out, here = results_directory(options), machine.describe()
    with tempfile.TemporaryDirectory(prefix="tower_train-") as scratch, Progress() as progress:
        places = (pathlib.Path(scratch, str(number)) for number in itertools.count())
        common = {name: getattr(options, name) for name in ("workload", "model", "dataset", "data_dir", "device")}
        common["fixed_path"] = str(pathlib.Path(scratch, _FIXED))
        progress.show("looking at data and devices")
        spec = common | {"kind": "describe", "batch_size": options.batch_size}
        with Worker(f"workload {options.workload}", spec, next(places), options.timeout_secs) as worker:
            about = worker.wait_for("described")
        common["dataset"] = about["dataset"]  # what `auto` chose is what all sides are trained on
        yield Session(options, out, progress, here, about, common, places)

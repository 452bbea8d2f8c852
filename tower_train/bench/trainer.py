"""tower_train as the processes of its sides run it; and a look at data and devices."""

import contextlib
import importlib
import tempfile
from collections.abc import Callable

import tensorflow as tf

import tower_train
from tower_train import workload as workloads
from tower_train.bench.sides import BenchmarkOptions, Side
from tower_train.graph import devices

_NO_END = 10**12  # steps


def common_facts(options: BenchmarkOptions) -> tuple[dict, list[Side]]:
    """Returns what all sides share, for JSON, and the workload's rivals, from the module `rivals` beside it if there is
    one."""
    present = [] if options.device == "cpu" else tf.config.list_physical_devices("GPU")
    with contextlib.suppress(RuntimeError):  # TensorFlow is in use already
        tf.config.set_visible_devices([], "GPU")  # whose memory is for the sides
    workload = find_workload(options.workload, options.model)
    workload.check_dataset(options.dataset)
    examples = workload.examples(workloads.DataRequest("train", options.dataset, options.data_dir))
    path, rivals = f"{options.workload.partition(':')[0]}.rivals", []
    try:
        rivals = importlib.import_module(path).of(workload.options, bool(present))
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
    return {
        "gpus": [devices.as_gpu(gpu).name for gpu in present],
        "data": examples.name,
        "dataset": examples.dataset,
        "notice": examples.notice,
        "optimizer": workload.config().optimizer,
    }, rivals


def find_workload(path: str, model: str | None) -> workloads.Workload:
    """Returns the workload at an import path, with one of its models if one is named; ConfigError if there is none."""
    return workloads.load(path).with_options({"model": model} if model else {})


def train(
    request: workloads.DataRequest,
    batch_size: int,
    after_step: Callable[[], bool],
    workload: str,
    model: str | None,
    **options,
) -> None:
    """Trains as `Side.train`, as `python -m tower_train` does. options: towers, and some of Config."""
    chosen, towers = find_workload(workload, model), options.pop("towers")
    with tempfile.TemporaryDirectory() as train_dir:
        run_config = chosen.config(
            dataset=request.dataset,
            data_dir=request.data_dir,
            num_gpus=towers,
            batch_size=batch_size // towers,
            train_dir=train_dir,
            max_steps=_NO_END,
            eval_at_end=False,
            summary_every_steps=0,
            save_every_steps=0,
            keep_hardest=None,
            **options,
        )
        tower_train.train(chosen, run_config, after_step=lambda step, report: after_step())

"""tower_train and the ceiling as the processes of their sides run them; and a look at data and devices."""

import contextlib
import importlib
import tempfile
import timeit
from collections.abc import Callable

import tensorflow as tf

import tower_train
from tower_train import config
from tower_train import workload as workloads
from tower_train.bench.sides import BenchmarkOptions, Side
from tower_train.graph import devices

v1 = tf.compat.v1

_NO_END = 10**12  # steps
_MATRIX_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
_MATRIX_TRIALS, _LONGEST_TRIAL_SECS = 5, 0.05


def common_facts(options: BenchmarkOptions) -> tuple[dict, list[Side]]:
    """Returns what all sides share, for JSON, and the workload's rivals, from the module `rivals` beside it if there is
    one; flops_per_example is None without."""
    present = [] if options.device == "cpu" else tf.config.list_physical_devices("GPU")
    with contextlib.suppress(RuntimeError):  # TensorFlow is in use already
        tf.config.set_visible_devices([], "GPU")  # whose memory is for the sides
    workload = find_workload(options.workload, options.model)
    workload.check_dataset(options.dataset)
    examples = workload.examples(workloads.DataRequest("train", options.dataset, options.data_dir))
    path, rivals, flops = f"{options.workload.partition(':')[0]}.rivals", [], None
    try:
        module = importlib.import_module(path)
        rivals, flops = module.of(workload.options, bool(present)), module.flops_per_example(workload.options)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
    return {
        "gpus": [devices.as_gpu(gpu).name for gpu in present],
        "data": examples.name,
        "dataset": examples.dataset,
        "notice": examples.notice,
        "optimizer": workload.config().optimizer,
        "flops_per_example": flops,
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


def multiply(request, batch_size: int, after_step, dtype: str, device: str, flops_per_example: float) -> None:
    """Multiplies square matrices of the size at which one device does most products per second; a step of
    `Side.train` has as many examples as a training with that arithmetic."""
    del request, batch_size
    placed = devices.place(config.DeviceOptions(device=device))
    with tf.Graph().as_default(), tf.device(placed.towers[0]), v1.Session(config=placed.session_config) as session:
        fastest = 0.0
        for size in _MATRIX_SIZES:
            trial = _product(session, size, tf.as_dtype(dtype))
            trial()  # the first one plans
            seconds = min(timeit.repeat(trial, number=1, repeat=_MATRIX_TRIALS))
            if size**3 / seconds > fastest:
                fastest, product = size**3 / seconds, trial
                after_step.examples_per_step = 2 * size**3 / flops_per_example
            if seconds > _LONGEST_TRIAL_SECS:
                break
        while not after_step():
            product()


def _product(session: v1.Session, size: int, dtype: tf.DType) -> Callable:
    """Returns a function that multiplies two random matrices [size, size]."""
    left, right = (
        v1.get_variable(f"{side}{size}", [size, size], dtype, v1.random_uniform_initializer(-1, 1))
        for side in ("left", "right")
    )
    session.run([left.initializer, right.initializer])
    return session.make_callable(tf.matmul(left, right)[0, 0])  # one element, to save copying the rest

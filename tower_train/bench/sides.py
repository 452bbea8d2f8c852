"""The sides as their workers run them: tower_train, a rival, or matrix products; and a first look at the data."""

import dataclasses
import importlib
import json
import sys
import timeit

import numpy as np
import tensorflow as tf

import tower_train
from tower_train import config as options
from tower_train import workload as workloads
from tower_train.bench import flops, systems
from tower_train.graph import devices, gpus, gradients, stream
from tower_train.graph.layout import on_host

v1 = tf.compat.v1

_NO_END = 10**12  # steps
_PATIENCE_SECS = 3600.0  # the benchmark itself watches the processes of a side
_MATRIX_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
_MATRIX_TRIALS, _LONGEST_TRIAL_SECS = 5, 0.05


def describe(spec: dict) -> dict:
    """Finds out what all sides share, and keeps one distorted batch for those with fixed inputs.

    Args:
      spec: workload, model, dataset, data_dir, device, batch_size, and fixed_path, the file for the batch.

    Returns:
      For JSON: gpus, data, dataset, notice, flops_per_example (None if shapes are not static), reference, rivals.
    """
    workload = workload_of(spec["workload"], spec["model"])
    workload.check_dataset(spec["dataset"])
    rivals = _rivals(spec["workload"], workload)
    examples = workload.examples(_request(spec))
    batch = _one_batch(workload, examples, spec["batch_size"])
    _save(spec["fixed_path"], batch)
    present = [] if spec["device"] == "cpu" else tf.config.list_physical_devices("GPU")
    return {
        "gpus": [gpus.about(gpu).name for gpu in present],
        "data": examples.name,
        "dataset": examples.dataset,
        "notice": examples.notice,
        "flops_per_example": _flops_per_example(workload.for_examples(examples), rivals, batch),
        "reference": rivals[0].name if rivals else None,
        "rivals": [
            {name: getattr(rival, name) for name in ("name", "num_devices", "num_processes", "forms", "dtype", "label")}
            for rival in rivals
        ],
    }


def run(spec: dict, pacer) -> None:
    """Runs one side until its pacer stops it.

    Args:
      spec: kind; workload, model, dataset, data_dir, device; batch_size; scratch, a directory of its own; and the
        `settings` of its `systems.System`.
      pacer: the `worker.Pacer` to which it reports its steps.
    """
    {"trainer": _run_trainer, "rival": _run_rival, "matmul": _run_matmul}[spec["kind"]](spec, pacer)


def card_bytes() -> list[int]:
    """Returns the peak of this process's memory on each visible GPU, in bytes, as its allocators count it."""
    if torch := sys.modules.get("torch"):  # it has its own allocator, beside TensorFlow's idle one
        return [torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count())]
    return [
        tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"]
        for gpu in tf.config.list_logical_devices("GPU")
    ]


def workload_of(path: str, model: str | None) -> workloads.Workload:
    """Returns the workload at an import path, with one of its models if one is named; ConfigError if there is none."""
    return workloads.load(path).with_options({"model": model} if model else {})


def _run_trainer(spec: dict, pacer) -> None:
    """Does as `python -m tower_train`, its hooks included, with one more hook."""
    workload = workload_of(spec["workload"], spec["model"])
    if spec["is_fixed"]:
        workload = fixed_workload(workload, spec["fixed_path"], _request(spec))
    reports = {"summary_every_steps": 0, "save_every_steps": 0}
    if spec["reports"] == systems.REPORTS:
        reports = systems.REPORT_STEPS
    if spec["reports"] in (systems.SILENCE, systems.UNGUARDED):
        reports["log_every_steps"] = _NO_END
    config = workload.config(
        dataset=spec["dataset"], data_dir=spec["data_dir"], device=spec["device"], dtype=spec["dtype"],
        num_gpus=spec["towers"], batch_size=spec["batch_size"] // spec["towers"] // spec["num_processes"],
        variable_update=spec["variable_update"], all_reduce=spec["all_reduce"], worker_timeout_secs=_PATIENCE_SECS,
        train_dir=f"{spec['scratch']}/run", max_steps=_NO_END, eval_at_end=False, **reports,
    )  # fmt: skip
    if spec["reports"] == systems.UNGUARDED:
        gradients.update_if_finite = update_unguarded
    tower_train.train(workload, config, [_AfterStep(pacer)])


def update_unguarded(tower_grads, tower_losses, applied_grads, loss, apply, skip):
    """Does as `gradients.update_if_finite` without the check that a step is finite, which no option turns off."""
    with tf.control_dependencies([apply()]):
        return tf.ones([len(tower_grads) + 1, len(applied_grads) + 1], tf.bool)


class _AfterStep(v1.train.SessionRunHook):
    def __init__(self, pacer):
        self._pacer = pacer

    def after_run(self, run_context, run_values):
        if self._pacer.after_step():
            run_context.request_stop()


def fixed_workload(workload: workloads.Workload, path: str, request: workloads.DataRequest) -> workloads.Workload:
    """Returns the workload with one batch, as part of the graph, instead of its examples and their preprocessing.

    A network that begins with values made from examples gets those of the request, before any preprocessing.
    """
    batch = _load(path)

    def fetch(indices):
        # Repeated up to the number asked for, since the check of the data takes more examples than a step.
        return tf.nest.map_structure(
            lambda array: tf.constant(np.resize(array, [indices.shape[0], *array.shape[1:]])), batch
        )

    def examples(request):
        return dataclasses.replace(workload.examples(request), open=lambda: fetch)

    inference_for = workload.inference_for and (lambda _: workload.inference_for(workload.examples(request)))
    return dataclasses.replace(workload, examples=examples, inference_for=inference_for, distort=None, prepare=None)


def _run_rival(spec: dict, pacer) -> None:
    rivals = _rivals(spec["workload"], workload_of(spec["workload"], spec["model"]))
    (rival,) = (rival for rival in rivals if rival.name == spec["name"])
    rival.train(_request(spec), spec["batch_size"], pacer.after_step)


def _run_matmul(spec: dict, pacer) -> None:
    """Multiplies square matrices of the size at which one device of this machine does most products per second."""
    placed = devices.place(options.DeviceOptions(device=spec["device"]))
    with tf.Graph().as_default(), tf.device(placed.towers[0]), v1.Session(config=placed.session_config) as session:
        fastest = 0.0
        for size in _MATRIX_SIZES:
            trial = _product(session, size, tf.as_dtype(spec["dtype"]))
            trial()  # the first one plans
            seconds = min(timeit.repeat(trial, number=1, repeat=_MATRIX_TRIALS))
            if size**3 / seconds > fastest:
                fastest, product, pacer.work_per_step = size**3 / seconds, trial, 2 * size**3
            if seconds > _LONGEST_TRIAL_SECS:
                break
        while not pacer.after_step():
            product()


def _product(session: v1.Session, size: int, dtype: tf.DType):
    """Returns a function that multiplies two random matrices [size, size]."""
    left, right = (
        v1.get_variable(f"{side}{size}", [size, size], dtype, v1.random_uniform_initializer(-1, 1))
        for side in ("left", "right")
    )
    session.run([left.initializer, right.initializer])
    return session.make_callable(tf.matmul(left, right)[0, 0])  # one element, to save copying the rest


def _one_batch(workload: workloads.Workload, examples: workloads.Examples, batch_size: int):
    """Returns the first (features, labels) of training, as numpy arrays."""
    without_gpus = v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.device("/cpu:0"), v1.Session(config=without_gpus) as session:
        first = stream.training_stream(
            workload, examples, seed=0, start=tf.zeros([], tf.int64), layout=on_host(batch_size, 1)
        )
        session.run(first.initializer)
        return session.run(first.batches[0])


def _save(path: str, batch) -> None:
    """Writes a nest of arrays as .npz: the arrays, and as JSON the nest of their numbers."""
    arrays = tf.nest.flatten(batch)
    numbers = tf.nest.pack_sequence_as(batch, list(range(len(arrays))))
    with open(path, "wb") as file:
        np.savez(file, *arrays, nest=json.dumps(numbers))


def _load(path: str):
    """Returns the nest of arrays that `_save` wrote, with tuples for lists."""
    with np.load(path, allow_pickle=False) as arrays:

        def filled(numbers):
            if isinstance(numbers, dict):
                return {key: filled(value) for key, value in numbers.items()}
            return tuple(map(filled, numbers)) if isinstance(numbers, list) else arrays[f"arr_{numbers}"]

        return filled(json.loads(str(arrays["nest"])))


def _flops_per_example(workload: workloads.Workload, rivals, batch) -> float | None:
    """Returns the operations of training the network, in its plain formulation if the rivals have one.

    The savings and the additions of a trick do not count.
    """
    with tf.Graph().as_default():
        features, labels = tf.nest.map_structure(lambda a: v1.placeholder(a.dtype, a.shape), batch)
        plain = rivals[0].plain_inference if rivals else None
        outputs = plain(features) if plain else workload.inference(features, True)
        try:
            return flops.training_flops(workload.loss(outputs, labels)) / len(tf.nest.flatten(batch)[0])
        except ValueError:
            return None


def _rivals(workload_path: str, workload: workloads.Workload) -> list:
    """Returns the rivals of a workload under its options, from the module `rivals` beside it, if there is one."""
    path = f"{workload_path.partition(':')[0]}.rivals"
    try:
        return importlib.import_module(path).of(workload.options)
    except ModuleNotFoundError as error:
        if error.name == path:
            return []
        raise


def _request(spec: dict) -> workloads.DataRequest:
    return workloads.DataRequest("train", spec["dataset"], spec["data_dir"])

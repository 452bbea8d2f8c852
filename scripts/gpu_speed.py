"""Measures how fast a machine's GPU trains, part by part, in about nine minutes:

    python scripts/gpu_speed.py [--out=DIR] [--data_dir=DIR] [--minutes=9] [--tiny] [PART ...]

Parts (all, unless you name some): equal (compiled towers beside uncompiled ones, in float64); cifar10_94, resnet50 and
tutorial (benchmarks); parts (one tower, and two on two parts of the card); recipe (seconds to 94 %, with and without
compilation, then again with cached programs); profile and profile_resnet50 (where a step's time goes, of cifar10_94 and
of ResNet-50). Each part has its own process and time limit, and prints its table when it is done.
All results go to DIR/speed.json. --tiny uses small sizes, to check on any machine that nothing fails.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
_NARROW = "--systems=keras/*bfloat16*,torch*bfloat16,tower_train/*bfloat16*"
# {part: (share of the minutes, benchmark's options)}
BENCHMARKS = {
    "cifar10_94": (0.2, ["--model=cifar10_94", "--batch_size=1536", _NARROW]),
    "resnet50": (0.25, ["--workload=tower_train.bench.resnet50", "--batch_size=128", _NARROW]),
    "tutorial": (0.14, ["--batch_size=1024", "--systems=keras/fit*,keras/multi*,torch*,tower_train/*float32*"]),
}
SHARES = {
    "equal": 0.08,
    **{name: share for name, (share, _) in BENCHMARKS.items()},
    "parts": 0.1,
    "recipe": 0.13,
    "profile": 0.05,
    "profile_resnet50": 0.05,
}
TINY_RECIPE = dict(
    global_batch_size=None, epochs=None, keep_hardest=None, batch_size=32, max_steps=6, eval_at_end=False
)
FEW_STEPS = dict(global_batch_size=None, epochs=None, keep_hardest=None, max_steps=60, eval_at_end=False)
COMPILING_SECS = 0.5  # a step that takes longer has compiled something, or is the last one with its evaluation
CACHE_FLAGS = "--tf_xla_persistent_cache_directory={} --tf_xla_deterministic_cluster_names=true"


def train(model, workload="cifar10", **options):
    """Trains one of a workload's models; returns (result, losses, seconds of each step)."""
    import tower_train
    from tower_train.bench import trainer

    losses, moments = [], [time.perf_counter()]

    def after_step(step, report):
        losses.append(float(report.loss))
        moments.append(time.perf_counter())

    workload = trainer.find_workload(workload, model).with_options(options.pop("workload_options", {}))
    options = dict(save_every_steps=0, check_data=False, summary_every_steps=0, check_towers="never") | options
    with tempfile.TemporaryDirectory() as train_dir:
        config = workload.config(**({"train_dir": train_dir} | options))
        result = tower_train.train(workload, config, after_step=after_step)
    return result, losses, [after - before for before, after in zip(moments, moments[1:], strict=False)]


def equal(options) -> dict:
    """Compares losses in float64: compiled and uncompiled towers, two towers on parts of the card and one."""
    steps, batch = (3, 4) if options.tiny else (12, 32)
    common = dict(dtype="float64", max_steps=steps, dataset="generated", eval_at_end=False)
    cases = {
        "never": dict(jit_compile="never", batch_size=batch),
        "always": dict(jit_compile="always", batch_size=batch),
        "always, two towers": dict(jit_compile="always", batch_size=batch // 2, num_gpus=2),
    }
    found = {name: in_a_process(model="convnet", **common, **case)[0] for name, case in cases.items()}
    gaps = {
        name: max(abs(a - b) / abs(a) for a, b in zip(found["never"], losses, strict=True))
        for name, losses in found.items()
        if name != "never"
    }
    for name, gap in gaps.items():
        print(f"{name}: losses of {steps} steps equal those of one uncompiled tower to {gap:.0e}")
    return gaps


def parts(options) -> dict:
    """Examples/sec of cifar10_94 by one tower, and by two on parts of the card that share the batch."""
    steps, batch = (6, 4) if options.tiny else (200, 1536)
    common = FEW_STEPS | dict(max_steps=steps, dataset="generated", variable_update="mirrored")
    found = {}
    for towers, name in enumerate(("one tower", "two towers"), start=1):
        _, seconds = in_a_process(model="cifar10_94", num_gpus=towers, batch_size=batch // towers, **common)
        found[name] = batch / statistics.median(seconds[steps // 4 :])
    one, two = found.values()
    print(f"parts: one tower {one:.0f} examples/sec, two on parts of the card {two:.0f}, {two / one:.2f} of it")
    return found


def in_a_process(**case) -> tuple[list[float], list[float]]:
    """Returns the losses and the seconds of a training in its own process: TensorFlow splits a GPU only once."""
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train_case, **case).result()


def train_case(**case) -> tuple[list[float], list[float]]:
    """Trains in this process; two towers share the only GPU if there is one."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and case.get("num_gpus", 1) > len(gpus):
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=12288)] * case["num_gpus"]
        tf.config.set_logical_device_configuration(gpus[0], parts)
    return train(**case)[1:]


def benchmark(part: str, options) -> dict:
    """Runs the benchmark; returns its rows."""
    out, arguments = options.out / part, BENCHMARKS[part][1]
    if options.tiny:
        arguments = [a for a in arguments if "batch_size" not in a and "systems" not in a]
        arguments += ["--batch_size=4", "--systems=keras/fit,tower_train/1 tower/float32", "--timeout_secs=600"]
    rounds = ["--rounds=1", "--seconds=0.2"] if options.tiny else ["--rounds=3", "--seconds=2"]
    data = [f"--data_dir={options.data_dir}"] if options.data_dir else ["--dataset=generated"] * (part != "resnet50")
    words = [sys.executable, "-m", "tower_train.benchmark", "--towers=1", "--start_together", f"--out={out}"]
    subprocess.run([*words, *rounds, *data, *arguments], check=True, cwd=ROOT)
    return json.loads((out / "benchmark.json").read_text())["parts"]


def recipe(options) -> dict:
    """Seconds of training of the recipe for 94 %, with and without the steps that compile."""
    dataset = dict(dataset="cifar10", data_dir=options.data_dir) if options.data_dir else dict(dataset="generated")
    tiny = TINY_RECIPE if options.tiny else {}
    sizes = {} if options.tiny else {"image_sizes": "0:20,1.5:24,4.5:32"}
    result, _, seconds = train("cifar10_94", num_gpus=1, workload_options=sizes, **dataset, **tiny)
    median, compiling = statistics.median(seconds), [each for each in seconds if each > COMPILING_SECS]
    found = {
        "steps": len(seconds),
        "seconds": sum(seconds),
        "compiling steps": len(compiling),
        "compiling": sum(compiling),
        "without compiling": sum(seconds) - sum(compiling),
        "median ms": 1e3 * median,
        "step seconds": seconds,
        "result": str(result),
    }
    print(
        f"recipe: {found['steps']} steps in {found['seconds']:.2f} s, {found['without compiling']:.2f} s without the "
        f"{found['compiling steps']} that compiled or evaluated; median {found['median ms']:.2f} ms a step"
    )
    return found


def profile(options) -> dict:
    """Measures the time of each kernel in six steps of cifar10_94 on the GPU."""
    dataset = dict(dataset="cifar10", data_dir=options.data_dir) if options.data_dir else dict(dataset="generated")
    return _kernels(options, model="cifar10_94", **dataset, **(TINY_RECIPE if options.tiny else FEW_STEPS))


def profile_resnet50(options) -> dict:
    """Measures the time of each kernel in six steps of ResNet-50 on the GPU."""
    few = dict(max_steps=4, batch_size=2) if options.tiny else dict(max_steps=60, batch_size=128, dtype="bfloat16")
    return _kernels(options, model=None, workload="tower_train.bench.resnet50", eval_at_end=False, **few)


def _kernels(options, **training) -> dict:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    first, last = (2, 3) if options.tiny else (40, 45)
    with tempfile.TemporaryDirectory() as folder:
        train(num_gpus=1, profile_steps=(first, last), train_dir=folder, **training)
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    count, kernels, launches = last - first + 1, {}, 0
    for plane in space.planes:
        for line in plane.lines if "/device:GPU" in plane.name else ():
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                kernels[name] = kernels.get(name, 0) + event.duration_ps / 1e9 / count
                launches += 1
    busy = sum(kernels.values())
    print(f"profile: GPUs work {busy:.2f} ms a step, in {launches / count:.0f} kernels and copies")
    for name, milliseconds in sorted(kernels.items(), key=lambda item: -item[1])[:20]:
        print(f"  {milliseconds:8.3f} ms {name[:90]}")
    return {"busy ms": busy, "launches": launches / count, "kernels ms": kernels}


def run_part(part: str, options) -> dict:
    if part in BENCHMARKS:
        return benchmark(part, options)
    others = {each.__name__: each for each in (equal, parts, recipe, profile, profile_resnet50)}
    return others[part](options)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *SHARES], metavar="PART")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(time.strftime("gpu_speed-%Y%m%d-%H%M%S")))
    parser.add_argument("--data_dir", type=os.path.abspath)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    if options.only:
        found = run_part(options.only, options)
        (options.out / f"{options.only}.json").write_text(json.dumps(found, indent=1))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    whole, failed = {}, []
    parts = [(part, {}) for part in options.parts or SHARES]
    if not options.tiny and "recipe" in dict(parts):  # twice: the second time, its programs are cached
        flags = {"TF_XLA_FLAGS": CACHE_FLAGS.format(options.out / "xla")}
        at = [part for part, _ in parts].index("recipe")
        parts[at : at + 1] = [("recipe", flags), ("recipe", flags)]
    for number, (part, environment) in enumerate(parts):
        print(f"== {part}", flush=True)
        words = [sys.executable, __file__, *argv, f"--only={part}", f"--out={options.out}"]
        limit = None if options.tiny else 60 * options.minutes * SHARES[part]
        try:
            subprocess.run(words, check=True, timeout=limit, env=os.environ | environment, stdin=subprocess.DEVNULL)
            name = part if part not in whole else f"{part} {number}"
            whole[name] = json.loads((options.out / f"{part}.json").read_text())
        except (subprocess.SubprocessError, OSError) as error:
            failed.append(part)
            print(f"FAILED: {part}: {error}", flush=True)
        (options.out / "speed.json").write_text(json.dumps(whole, indent=1))
    print(f"Written: {options.out / 'speed.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

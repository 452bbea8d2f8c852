"""The values of options that are left to the machine: dtype, place of the variables, all-reduce, time-out of stalls."""

import dataclasses

import jobs
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Config, EvaluateOptions, evaluate_run, host
from tower_train.config import ExportOptions
from tower_train.graph import devices, training
from tower_train.graph.devices import Gpu
from tower_train.inference import saved_model
from tower_train.run import choices
from tower_train.run_dir import manifest
from tower_train.workload import DataRequest

v1 = tf.compat.v1
PROCESSOR = (
    "processor\t: {core}\nmodel name\t: Some avx512_bf16 processor\n{name}\t\t: fpu sse2 {flags}\nbugs\t\t: bf16\n\n"
)
A100, RTX, FAKE = Gpu("A100", (8, 0)), Gpu("RTX 4090", (8, 9)), Gpu("fake GPU")
ELASTIC = dict(elastic="1:2", worker_hosts="a:1,b:1", task_index=0, train_dir="x")


@pytest.fixture
def cpuinfo_path(tmp_path, monkeypatch):
    """The file that describes the processor; nothing lies there yet."""
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    return host.CPUINFO


def cpuinfo(*flags_of_cores, name="flags"):
    return "".join(PROCESSOR.format(core=i, name=name, flags=flags) for i, flags in enumerate(flags_of_cores))


def resolve(here=(), before=(), num_workers=1, **options):
    """(config, lines) of as many towers as there are GPUs here, or of two."""
    config = Config(**(dict(num_gpus=len(here) or 2) | options))
    placed = dataclasses.replace(devices.place(config, list(here)), num_workers=num_workers)
    return choices.resolve(config, dict(before), placed)


@pytest.mark.parametrize(
    ("text", "instructions"),
    [
        (cpuinfo("avx2 avx512f avx512_bf16 fma") * 2, "avx512_bf16"),
        (cpuinfo("amx_bf16 avx512_bf16 amx_tile"), "amx_bf16"),
        (cpuinfo("asimd i8mm bf16 dgh", name="Features"), "bf16"),
        ("vendor_id : GenuineIntel\n" + cpuinfo("avx512_bf16"), ""),
        (cpuinfo("avx2 avx512f avx512_bf161 xbf16") * 2, ""),
        (cpuinfo("asimd", "asimd bf16", name="Features"), ""),  # not every core
        (cpuinfo("bf16", name="vmx flags"), None),
        (None, None),  # another system than Linux
    ],
)
def test_a_processor_is_known_by_its_flags(text, instructions, cpuinfo_path):
    if text is not None:
        cpuinfo_path.write_text(text)
    config, [note] = resolve(dtype="auto")
    why = f"since this processor has fast instructions for it ({instructions})"
    if not instructions:
        why = f"since {cpuinfo_path} does not tell" if instructions is None else "since this processor has no fast"
    assert config.dtype == ("bfloat16" if instructions else "float32")
    assert note.startswith(f"dtype: {config.dtype}, {why}")


@pytest.mark.parametrize(
    ("gpus", "dtype", "why"),
    [
        ([Gpu("H200", (9, 0)), A100], "bfloat16", "since A100 has compute capability 8.0"),
        ([A100, Gpu("T4", (7, 5))], "float16", "since T4 has compute capability 7.5"),
        ([Gpu("T4", (7, 5)), Gpu("P100", (6, 0))], "float32", "since P100 has compute capability 6.0"),
        ([Gpu("T4", (7, 5)), FAKE], "float32", "since the compute capability of fake GPU is not known"),
    ],
)
def test_every_gpu_must_have_it(gpus, dtype, why):
    config, notes = resolve(gpus, dtype="auto")
    assert config.dtype == dtype and f"dtype: {dtype}, {why}" in notes


def test_only_the_gpus_that_are_used_are_looked_at():
    here = [Gpu("a", (9, 0)), Gpu("b", (7, 0)), Gpu("c", (8, 6))]
    for chosen, dtype in (((0,), "bfloat16"), ((0, 1), "float16"), ((0, 2), "bfloat16"), ((1,), "float16")):
        assert resolve(here, dtype="auto", num_gpus=None, gpus=chosen)[0].dtype == dtype


def test_a_run_says_what_it_chose_and_keeps_it_on_another_processor(cpuinfo_path, tmp_path, capsys):
    """run.json, evaluation and export have the resolved one."""
    run = tmp_path / "run"
    for flags, chosen, steps in [("avx512_bf16", "bfloat16", 5), ("avx2", "float32", 10)]:
        cpuinfo_path.write_text(cpuinfo(flags))
        alone = tmp_path / chosen
        jobs.train_toy(alone, max_steps=5, dtype="auto")
        output = capsys.readouterr().out
        assert f"parameters, {chosen};" in output and f"\ndtype: {chosen}, since this processor has" in output
        assert jobs.read_json(alone, "run.json")["config"]["dtype"] == chosen
        jobs.train_toy(run, max_steps=steps, dtype="auto")
        assert jobs.read_json(run, "run.json")["config"]["dtype"] == "bfloat16"
    output = capsys.readouterr().out
    assert "\ndtype: bfloat16, as the run began" in output and "(resumed at step 5)" in output
    assert "Changed since" not in output
    [found] = evaluate_run(EvaluateOptions(train_dir=str(run)))
    assert found.step == 10
    assert saved_model.export(ExportOptions(train_dir=str(run)), run / "export")[0] == run / "export"


ON_GPUS, BEGAN = "variable_update: mirrored, on the GPUs", dict(variable_update="mirrored")


@pytest.mark.parametrize(
    ("gpus", "before", "options", "expected", "lines"),
    [
        ([], {}, {}, ("cpu", None), []),
        ([A100], {}, {}, ("mirrored", None), [ON_GPUS]),
        ([A100] * 8, {}, {}, ("mirrored", "nccl"), [ON_GPUS, "all_reduce: nccl, between 8 GPUs"]),
        ([A100] * 2, {}, dict(variable_update="cpu"), ("cpu", None), []),
        ([A100] * 2, {}, dict(variable_update="mirrored", all_reduce="add_n"), ("mirrored", "add_n"), []),
        ([A100] * 2, {}, dict(all_reduce="collective"), ("mirrored", "collective"), ["for --all_reduce"]),
        ([A100] * 2, dict(variable_update="cpu"), {}, ("cpu", None), ["variable_update: cpu, as the run began"]),
        ([A100] * 2, dict(variable_update="cpu"), dict(all_reduce="nccl"), ("mirrored", "nccl"), ["for --all"]),
        ([A100] * 2, dict(variable_update="cpu"), dict(check_mirrors_every_steps=5), ("mirrored", "nccl"), ["for --"]),
        ([], {}, dict(all_reduce="add_n"), ("mirrored", "add_n"), []),
        ([], {}, dict(check_mirrors_every_steps=5), ("mirrored", None), []),
        ([], BEGAN, {}, ("mirrored", None), []),
        ([FAKE] * 2, {}, {}, ("mirrored", "collective"), [ON_GPUS, "NVIDIA's GPUs, which fake GPU is not known to be"]),
    ],
)
def test_towers_on_gpus_have_their_variables_there_unless_something_else_is_asked_for(
    gpus, before, options, expected, lines
):
    config, notes = resolve(gpus, before, **options)
    assert (config.variable_update, config.all_reduce) == expected
    assert all(line in note for line, note in zip(lines, notes, strict=False)) and len(notes) >= len(lines)
    assert notes or not gpus or config.variable_update == options["variable_update"]


def test_several_towers_on_one_gpu_average_by_the_ring():
    config = Config(num_gpus=2, variable_update="mirrored")
    placed = devices.place(config, [A100, A100])
    placed.session_config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[1024, 1024])
    config, lines = choices.resolve(config, {}, placed)
    assert config.all_reduce == "collective" and "several towers on one GPU" in lines[0]


def test_cards_of_different_models_are_announced_and_their_copies_compared():
    mixed, notes = resolve([A100, RTX])
    assert mixed.check_mirrors_every_steps == 100
    assert notes[-1].startswith(
        "*** GPUs of different models (A100, RTX 4090): the slowest sets the pace of all. Their"
    )
    changes = ([RTX] * 2, {}, 0), ([A100, RTX], {"check_mirrors_every_steps": 7}, 7), ([A100, RTX], ELASTIC, 0)
    for gpus, options, every in changes:
        assert resolve(gpus, **options)[0].check_mirrors_every_steps == every


def test_the_graph_has_its_weights_on_the_gpu_and_averages_between_several():
    for num_gpus in (1, 2):
        config = Config(num_gpus=num_gpus, batch_size=2)
        placed = devices.place(config, [A100] * num_gpus)
        config, _ = choices.resolve(config, {}, placed)
        examples = toy_workload.load(DataRequest("train"))
        graph = training.training_graph(toy_workload.WORKLOAD, examples, config, placed).graph
        with graph.as_default():
            assert {variable.device for variable in v1.trainable_variables()} == {"/device:GPU:0"}
    means = [op for op in graph.get_operations() if op.type == "CollectiveReduce"]
    assert {(op.device, op.get_attr("communication_hint")) for op in means} == {
        ("/device:GPU:0", b"nccl"), ("/device:GPU:1", b"nccl"),
    }  # fmt: skip


def test_a_resumed_run_goes_on_with_what_its_run_json_has(tmp_path):
    """All workers of a cluster must have it in common, too."""
    for options in (dict(variable_update="mirrored"), {}):
        jobs.train_toy(tmp_path, max_steps=1, **options)
        run_json = jobs.read_json(tmp_path, "run.json")
        assert run_json["config"]["variable_update"] == "mirrored"
    assert {"--variable_update", "--all_reduce"} <= manifest.same_everywhere(run_json, toy_workload.WORKLOAD).keys()


@pytest.mark.parametrize(
    ("gpus", "num_workers", "options", "secs"),
    [
        ([], 1, dict(variable_update="mirrored"), 0.0),
        ([A100] * 2, 1, dict(variable_update="cpu"), 0.0),
        ([A100] * 2, 1, dict(variable_update="mirrored"), 1800.0),
        ([], 2, {}, 1800.0),
        ([], 1, ELASTIC, 1800.0),
        ([], 2, dict(stall_timeout_secs=0.0), 0.0),
        ([], 1, dict(stall_timeout_secs=9.0), 9.0),
    ],
)
def test_steps_that_wait_for_other_devices_are_watched_by_default(gpus, num_workers, options, secs):
    config, _ = resolve(gpus, num_workers=num_workers, **options)
    assert config.stall_timeout_secs == secs

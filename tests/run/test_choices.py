"""The values of options that are left to the machine: dtype, place of the variables, all-reduce, time-out of stalls."""

import dataclasses

import jobs
import pytest
import toy_workload

from tower_train import Config, EvaluateOptions, evaluate_run, host
from tower_train.config import ExportOptions
from tower_train.graph import devices
from tower_train.graph.devices import Gpu
from tower_train.inference import saved_model
from tower_train.run import choices
from tower_train.run_dir import manifest

PROCESSOR = (
    "processor\t: {core}\nmodel name\t: Some avx512_bf16 processor\n{name}\t\t: fpu sse2 {flags}\nbugs\t\t: bf16\n\n"
)
A100, RTX, FAKE = Gpu("A100", (8, 0)), Gpu("RTX 4090", (8, 9)), Gpu("fake GPU")
T4, P100, TWO = Gpu("T4", (7, 5)), Gpu("P100", (6, 0)), [A100, A100]
ON_GPUS, AUTO, BEGAN = "variable_update: mirrored, on the GPUs", dict(dtype="auto"), dict(variable_update="cpu")
ELASTIC = dict(elastic="1:2", worker_hosts="a:1,b:1", task_index=0, train_dir="x")


@pytest.fixture
def cpuinfo_path(tmp_path, monkeypatch):
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


def test_a_run_says_what_it_chose_and_keeps_it_elsewhere(cpuinfo_path, tmp_path, capsys):
    options, run = dict(num_gpus=2, batch_size=8, dtype="auto"), tmp_path / "run"
    cpuinfo_path.write_text(cpuinfo("avx512_bf16"))
    jobs.train_small(run, max_steps=5, variable_update="mirrored", **options)
    output = capsys.readouterr().out
    assert "parameters, bfloat16;" in output and "\ndtype: bfloat16, since this processor has" in output
    cpuinfo_path.write_text(cpuinfo("avx2"))
    jobs.train_small(run, max_steps=10, **options)
    run_json = jobs.read_json(run, "run.json")
    assert (run_json["config"]["dtype"], run_json["config"]["variable_update"]) == ("bfloat16", "mirrored")
    output = capsys.readouterr().out
    assert "\ndtype: bfloat16, as the run began" in output and "(resumed at step 5)" in output
    assert "Changed since" not in output
    [found] = evaluate_run(EvaluateOptions(train_dir=str(run)))
    assert found.step == 10
    assert saved_model.export_run(ExportOptions(train_dir=str(run)))[0] == run / "export"
    assert {"--variable_update", "--all_reduce"} <= manifest.same_everywhere(run_json, toy_workload.WORKLOAD).keys()


MIRRORED = dict(variable_update="mirrored")


@pytest.mark.parametrize(
    ("here", "options", "expected", "lines"),
    [
        ([Gpu("H200", (9, 0)), A100], AUTO, dict(dtype="bfloat16"), ["since A100 has compute capability 8.0"]),
        ([A100, T4], AUTO, dict(dtype="float16"), ["since T4 has compute capability 7.5"]),
        ([T4, P100], AUTO, dict(dtype="float32"), ["since P100 has compute capability 6.0"]),
        ([T4, FAKE], AUTO, dict(dtype="float32"), ["since the compute capability of fake GPU is not known"]),
        ([A100, T4, P100], AUTO | dict(gpus=(1,)), dict(dtype="float16"), ["since T4 has"]),
        ([], {}, dict(variable_update="cpu", all_reduce=None), []),
        ([A100] * 8, {}, dict(all_reduce="nccl"), [ON_GPUS, "all_reduce: nccl, between 8 GPUs"]),
        (TWO, BEGAN, dict(all_reduce=None, stall_timeout_secs=0.0), []),
        (TWO, dict(all_reduce="collective"), MIRRORED | dict(all_reduce="collective"), ["for --all_reduce"]),
        (TWO, dict(before=BEGAN), dict(variable_update="cpu", all_reduce=None), ["variable_update: cpu, as the run"]),
        (TWO, dict(before=BEGAN, all_reduce="nccl"), MIRRORED, ["for --all_reduce"]),
        (TWO, dict(before=BEGAN, check_mirrors_every_steps=5), MIRRORED, ["for --check_mirrors", "nccl"]),
        ([], dict(check_mirrors_every_steps=5), MIRRORED | dict(all_reduce=None), []),
        ([FAKE] * 2, {}, dict(all_reduce="collective"), [ON_GPUS, "NVIDIA's GPUs, which fake GPU is not known to be"]),
        (
            [A100, RTX],
            {},
            dict(check_mirrors_every_steps=100),
            [ON_GPUS, "nccl", "*** GPUs of different models (A100, RTX 4090): the slowest sets the pace of all."],
        ),
        ([A100, RTX], BEGAN, dict(check_mirrors_every_steps=0), []),
        ([A100, RTX], dict(check_mirrors_every_steps=7), dict(check_mirrors_every_steps=7), ["for", "nccl", "***"]),
        ([A100, RTX], ELASTIC, dict(check_mirrors_every_steps=0), [ON_GPUS, "nccl", "***"]),
        # Steps that wait for other devices are watched.
        ([], MIRRORED, dict(stall_timeout_secs=0.0), []),
        (TWO, MIRRORED, dict(stall_timeout_secs=1800.0), ["all_reduce: nccl"]),
        ([], dict(num_workers=2), dict(stall_timeout_secs=1800.0), []),
        ([], ELASTIC, dict(stall_timeout_secs=1800.0), []),
        ([], dict(stall_timeout_secs=9.0), dict(stall_timeout_secs=9.0), []),
    ],
)
def test_what_is_left_open_is_chosen_by_the_devices_and_what_is_not_stays(here, options, expected, lines):
    config, notes = resolve(here, **({"num_gpus": None} if "gpus" in options else {}) | options)
    assert dataclasses.asdict(config).items() >= expected.items()
    compiled = [note for note in notes if note.startswith("jit_compile: ")]
    assert (config.jit_compile, len(compiled)) == (("always", 1) if here else ("never", 0))
    notes = [note for note in notes if note not in compiled]
    assert all(line in note for line, note in zip(lines, notes, strict=False))
    assert "dtype" in options or len(notes) == len(lines)


def test_several_towers_on_one_gpu_average_by_the_ring():
    config = Config(num_gpus=2, variable_update="mirrored")
    placed = devices.place(config, TWO)
    placed.session_config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[1024, 1024])
    config, lines = choices.resolve(config, {}, placed)
    assert config.all_reduce == "collective" and "several towers on one GPU" in lines[0]

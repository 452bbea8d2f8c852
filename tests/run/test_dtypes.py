"""--dtype=auto takes bfloat16 where there are instructions for it, or float16, says why, and stays with it."""

import jobs
import pytest

from tower_train import Config, EvaluateOptions, evaluate_run, host
from tower_train.config import ExportOptions
from tower_train.graph import devices
from tower_train.graph.devices import Gpu
from tower_train.inference import saved_model
from tower_train.run import choices

PROCESSOR = (
    "processor\t: {core}\nmodel name\t: Some avx512_bf16 processor\n{name}\t\t: fpu sse2 {flags}\nbugs\t\t: bf16\n\n"
)
AUTO = Config(dtype="auto")
NONE = "since this processor has no fast bfloat16 instructions"
UNKNOWN = "since {path} does not tell this processor's instructions"


@pytest.fixture
def cpuinfo_path(tmp_path, monkeypatch):
    """The file that describes the processor; nothing lies there yet."""
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    return host.CPUINFO


def cpuinfo(*flags_of_cores, name="flags"):
    return "".join(PROCESSOR.format(core=i, name=name, flags=flags) for i, flags in enumerate(flags_of_cores))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (cpuinfo("avx2 avx512f avx512_bf16 fma") * 2,
         ("bfloat16", "since this processor has fast instructions for it (avx512_bf16)")),
        (cpuinfo("amx_bf16 avx512_bf16 amx_tile"),
         ("bfloat16", "since this processor has fast instructions for it (amx_bf16)")),
        (cpuinfo("asimd i8mm bf16 dgh", name="Features"),
         ("bfloat16", "since this processor has fast instructions for it (bf16)")),
        ("vendor_id : GenuineIntel\n" + cpuinfo("avx512_bf16"), ("float32", NONE)),
        (cpuinfo("avx2 avx512f avx512_bf161 xbf16") * 2, ("float32", NONE)),
        (cpuinfo("asimd", "asimd bf16", name="Features"), ("float32", NONE)),  # not every core
        (cpuinfo("bf16", name="vmx flags"), ("float32", UNKNOWN)),
        (None, ("float32", UNKNOWN)),  # another system than Linux
    ],
)  # fmt: skip
def test_a_processor_is_known_by_its_flags(text, expected, cpuinfo_path):
    if text is not None:
        cpuinfo_path.write_text(text)
    dtype, why = expected
    config, [note] = choices.resolve(AUTO, {}, devices.place(AUTO))
    assert (config.dtype, note) == (dtype, f"dtype: {dtype}, {why.format(path=cpuinfo_path)}")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([Gpu("H200", (9, 0)), Gpu("A100", (8, 0))], ("bfloat16", "since A100 has compute capability 8.0")),
        ([Gpu("A100", (8, 0)), Gpu("T4", (7, 5))], ("float16", "since T4 has compute capability 7.5")),
        ([Gpu("T4", (7, 5)), Gpu("P100", (6, 0))], ("float32", "since P100 has compute capability 6.0")),
        ([Gpu("T4", (7, 5)), Gpu("X")], ("float32", "since the compute capability of X is not known")),
    ],
)  # fmt: skip
def test_every_gpu_must_have_it(gpus, expected):
    assert choices.of_gpus(gpus) == expected


def test_only_the_gpus_that_are_used_are_looked_at():
    here = [Gpu("a", (9, 0)), Gpu("b", (7, 0)), Gpu("c", (8, 6))]
    for options, expected in [(dict(num_gpus=1), "bfloat16"), (dict(num_gpus=2), "float16"),
                              (dict(gpus=(0, 2)), "bfloat16"), (dict(gpus=(1,)), "float16")]:  # fmt: skip
        config = Config(dtype="auto", **options)
        assert choices.resolve(config, {}, devices.place(config, here))[0].dtype == expected


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

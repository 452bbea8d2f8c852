"""The table of names: each entry is there, and what is not is said with its line and replacement."""

import importlib.util
import re

import jobs
import pytest

from tower_train import tf1
from tower_train.fronts.tf1 import names, source

TABLE = """
from tower_train.fronts.tf1 import names, views
for uses_keras_3 in (False, True):
    table, find = names.table(uses_keras_3), views.finder(uses_keras_3)
    for name, row in table.items():
        if "tf_slim" not in row and not row.startswith("use:") and not (uses_keras_3 and "estimator" in name):
            found = find(name)
            assert not row or getattr(found, "_modules", found), name
            assert len(row.split()) < 2 or len(found._modules) >= len(row.split()), name
"""


PRIVATE = """
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import ops
from tensorflow.python.ops.variables import VariableV1
import tensorflow as tf
from tensorflow.python.estimator.model_fn import ModeKeys
assert ModeKeys is tf.estimator.ModeKeys and tf.logging.__dict__["INFO"] == tf.logging.INFO
assert __package__ is None  # as in a program that Python itself runs
registers = ops.register_tensor_conversion_function is tf.register_tensor_conversion_function
print(registers, VariableV1 is tf.Variable)
"""


REFUSED = """
import tensorflow as tf
print(hasattr(tf, 'nothing'))
from tensorflow.contrib import crf  # may be imported: programs for TPUs and others ask first
crf.crf_decode
"""


STRATEGY = """
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
model.compile('sgd', 'mse', distribute=tf.contrib.distribute.MirroredStrategy(num_gpus=2))
"""


def test_every_name_of_the_table_is_there():
    with jobs.Program("-c", TABLE, TF_USE_LEGACY_KERAS="1") as program:
        assert program.process.wait(jobs.WAIT_SECS) == 0, program.output()


@pytest.mark.parametrize(
    "name, one",
    [
        ("tensorflow.python.keras.layers", "keras.layers"),
        ("tensorflow.contrib.layers.python.layers", "tensorflow.contrib.layers"),
        ("tensorflow.contrib.layers.python", "tensorflow.contrib.layers"),
        ("tensorflow.compat.v1.nn", "tensorflow.nn"),
        ("keras.utils.training_utils.multi_gpu_model", "keras.utils.multi_gpu_model"),
    ],
)
def test_a_thing_with_several_names_has_one(name, one):
    assert names.one_name(name) == one


def test_check_lists_names_with_lines_and_replacements(tmp_path):
    source = "import tensorflow as tf\nx = tf.contrib.quantize.Q\nimport keras, net.model\nkeras.optimizers.rmsprop\n"
    source += "from functools import reduce\nfor i in xrange(reduce(min, [1, 2])):\n  pass\n"
    (tmp_path / "old.py").write_text(source)
    (tmp_path / "net").mkdir()  # whose files import what is beside them
    (tmp_path / "net" / "model.py").write_text("from . import saving\n")
    (tmp_path / "net" / "saving.py").write_text("import package.loss\n")
    (tmp_path / "lib" / "package").mkdir(parents=True)  # on Python's path, and not installed
    (tmp_path / "lib" / "package" / "loss.py").write_text("import tensorflow.contrib.graph_editor as ge\nge.sgv\n")
    path = f"{jobs.ROOT}:{tmp_path / 'lib'}"
    done = jobs.command("tower_train.tf1", "--check", "old.py", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 2, done.stderr
    missing = "tensorflow.contrib.quantize.Q is not there. Replacement: the package"
    assert re.search(f"^old.py:2: {missing}", done.stdout, re.M)
    assert re.search(r"package/loss.py:2: tensorflow.contrib.graph_editor.sgv .* tf.recompute_grad", done.stdout, re.M)
    assert "old.py:6: xrange is of Python 2. Convert it first: 2to3 -w" in done.stdout
    assert "Missing names: 3." in done.stdout


@pytest.mark.parametrize(
    ("program", "status", "shown", "last"),
    [
        (PRIVATE, 0, "True True\n", ""),
        (REFUSED, 2, "False\n", "old.py:5: tensorflow.contrib.crf.crf_decode is not there"),
        (STRATEGY, 2, "", "old.py:4: strategy.*Take multi_gpu_model"),
        ("print 'hello'\n", 2, "", "old.py:1 is not Python 3"),
    ],
)
def test_private_and_older_names_are_there_and_what_is_not_ends_a_program_in_one_line(
    tmp_path, program, status, shown, last
):
    (tmp_path / "old.py").write_text(program)
    done = jobs.command("tower_train.tf1", "old.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, shown), done.stderr
    assert re.search(rf"{last}.*\s*\Z", done.stderr) and "Traceback" not in done.stderr


def test_a_program_in_a_package_imports_as_by_its_modules_name(tmp_path):
    (tmp_path / "net" / "bin").mkdir(parents=True)
    for name in ("__init__", "bin/__init__", "bin/sizes"):
        (tmp_path / "net" / f"{name}.py").write_text(
            "import tensorflow as tf\ntf.contrib.nothing.more\n" * ("z" in name)
        )
    program = "from net.bin import sizes\nfrom ..bin import sizes as again\nprint(sizes is again, __package__)\n"
    (tmp_path / "net" / "bin" / "old.py").write_text(program)
    done = jobs.command("tower_train.tf1", "--check", "net/bin/old.py", cwd=tmp_path)
    assert "sizes.py:2: tensorflow.contrib.nothing.more is not there" in done.stdout
    (tmp_path / "net" / "bin" / "sizes.py").write_text("")
    done = jobs.command("tower_train.tf1", "net/bin/old.py", cwd=tmp_path)
    assert done.stdout == "True net.bin\n", done.stderr


def test_a_wrong_option_and_a_missing_extra_are_named_in_one_line(tmp_path, monkeypatch, refusal):
    assert "unrecognized arguments: --nope. Write" in refusal(tf1, "--nope", "program.py")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name != "tf_keras" and find(name, *more))
    (tmp_path / "program.py").write_text("import tensorflow as tf\n")
    line = refusal(tf1, str(tmp_path / "program.py"))
    assert "The package tf_keras is missing. Install it: pip install 'tower_train[tf1]'" in line


@pytest.mark.parametrize(
    "line, keras",
    [
        ("tf.log(1.0)", 2),
        ("tf.set_random_seed(1)", 3),
        ("tf.function(print)", 3),
        ("keras.backend.function([], [])", 2),
        ("model.add_loss(1.0)", 2),
        ("self.add_loss(1.0)", 3),
        ("data.make_one_shot_iterator()", 2),
        ("tf.compat.v1.Session()", 2),
    ],
)
def test_a_program_of_keras_has_todays_unless_it_uses_graphs(tmp_path, line, keras):
    (tmp_path / "old.py").write_text(f"import keras, tensorflow as tf\n{line}\n")
    assert source.Program(str(tmp_path / "old.py")).uses_keras_3 == (keras == 3)

"""The published program, ported: its command, its losses' collection and its mean."""

import os
import re
import shutil

import numpy as np
import tensorflow as tf

from cifar10 import multi_gpu_train

v1 = tf.compat.v1
WORDS = ["--num_gpus=2", "--batch_size=2", "--max_steps=11"]


def test_the_command_trains_and_logs_every_ten_steps(cifar10_dir, command):
    status, stdout, _ = command(multi_gpu_train, *WORDS, f"--data_dir={cifar10_dir}")
    assert status == 0
    lines = re.findall(r": step (\d+), loss = \d+\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)", stdout)
    assert lines == ["0", "10"]


def test_a_file_that_is_cut_off_is_named(cifar10_dir, tmp_path, command):
    there = shutil.copytree(cifar10_dir, tmp_path / "cut")
    os.truncate(there / "data_batch_3.bin", 4000)
    status, stdout, stderr = command(multi_gpu_train, *WORDS, f"--data_dir={there}")
    assert (status, stdout) == (2, "") and re.search(r"error: .*/data_batch_3.bin: has 4000 bytes; .*\n\Z", stderr)


def test_a_towers_loss_has_its_own_cross_entropy_and_the_weight_decay():
    with tf.Graph().as_default(), v1.Session() as session:
        images, labels = tf.random.normal([4, 24, 24, 3], seed=1), tf.constant([0, 3, 5, 9])
        with v1.variable_scope(v1.get_variable_scope()):
            for i in range(2):
                with v1.name_scope(f"tower_{i}") as scope:
                    loss = multi_gpu_train.tower_loss(scope, images, labels)
                    v1.get_variable_scope().reuse_variables()
        variables = {variable.op.name: variable for variable in v1.trainable_variables()}
        session.run(v1.global_variables_initializer())
        logits = session.graph.get_tensor_by_name("tower_1/softmax_linear/add:0")
        found, logits, variables = session.run((loss, logits, variables))
    entropies = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), [0, 3, 5, 9]]
    decay = sum(0.004 / 2 * (variables[f"{name}/weights"] ** 2).sum() for name in ("local3", "local4"))
    np.testing.assert_allclose(found, entropies.mean() + decay, rtol=1e-5)


def test_gradients_are_averaged_over_towers():
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(name, [2]) for name in "ab"]
        towers = [[(tf.constant([i, 2.0 * i]), variable) for variable in variables] for i in (1.0, 2.0, 6.0)]
        averaged = multi_gpu_train.average_gradients(towers)
        assert [variable for _, variable in averaged] == variables
        for gradient, _ in averaged:
            np.testing.assert_allclose(session.run(gradient), [3.0, 6.0])

"""A model of multi_gpu_model is used like the Keras model that it is made of, and refuses what towers cannot do."""

import copy
import csv
import pickle
import textwrap
import types

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_twins import CROSS_ENTROPY, assert_same, data, fit_both, twins

import tower_train
from tower_train.errors import ConfigError
from tower_train.fronts.keras_towers import exchange, step
from tower_train.fronts.keras_towers.model import TowerModel

layers = keras.layers


class TestUse:
    def parallel(self, gpus=2):
        model = keras.Sequential([keras.Input([4]), layers.Dense(8, "relu"), layers.Dense(3, "softmax")])
        parallel = tower_train.multi_gpu_model(model, gpus=gpus)
        parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return parallel

    def test_callbacks_work_as_documented(self, tmp_path):
        parallel = self.parallel()
        x, y = data(20, 4)
        rates, seen = [0.1, 0.05, 0.02, 0.01], []
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, _: rates[epoch]),
            keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True),
            keras.callbacks.TensorBoard(tmp_path / "events", histogram_freq=1),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(parallel.template.get_weights())),
        ]
        history = parallel.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks, validation_data=(x, y))
        # "max" takes a falling loss for a growing harm: the first epoch is the best, and the second the last.
        assert len(history.epoch) == len(seen) == 2
        assert history.history["learning_rate"] == pytest.approx(rates[:2])
        rows = list(csv.DictReader(open(tmp_path / "log.csv")))
        assert [float(row["val_loss"]) for row in rows] == pytest.approx(history.history["val_loss"])
        assert jobs.events(tmp_path / "events" / "train").Tags()["tensors"]
        for epoch, weights in enumerate(seen, start=1):
            saved = keras.models.load_model(tmp_path / f"{epoch}.keras")
            assert type(saved) is keras.Sequential and saved.optimizer.iterations == 3 * epoch
            for found, expected in zip(saved.get_weights(), weights, strict=True):
                np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(parallel.get_weights()[0], seen[0][0])
        parallel.load_weights(tmp_path / "2.weights.h5")
        np.testing.assert_array_equal(parallel.template.get_weights()[0], seen[1][0])

    def test_a_model_that_was_compiled_before_keeps_its_optimizer_loss_and_metrics(self):
        one, template = twins(lambda: keras.Sequential([keras.Input([4]), layers.Dense(3)]))
        for model in (one, template):
            model.compile(keras.optimizers.SGD(0.5), CROSS_ENTROPY, metrics=["accuracy"])
        parallel = tower_train.multi_gpu_model(template, gpus=2)
        x, y = data(12, 4)
        histories = [model.fit(x, y, 4, 2, shuffle=False, verbose=0).history for model in (one, parallel)]
        np.testing.assert_allclose(template.get_weights()[0], one.get_weights()[0], atol=1e-6)
        assert list(histories[1]) == list(histories[0]) == ["accuracy", "loss"]
        assert parallel.optimizer is template.optimizer and template.optimizer.iterations == 6

    def test_a_template_that_is_compiled_anew_trains_with_that(self, monkeypatch, capsys):
        monkeypatch.setattr(step, "_LONG_SECS", 600)
        parallel = self.parallel()
        x, y = data(16, 4)
        parallel.fit(x, y, batch_size=8, verbose=0)
        parallel.template.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
        before = parallel.template.get_weights()
        still = keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)
        history = parallel.fit(x, y, batch_size=8, verbose=0, callbacks=[still]).history
        assert history["learning_rate"] == [0.0] and parallel.optimizer is parallel.template.optimizer
        assert parallel.optimizer.iterations == 2
        for found, expected in zip(parallel.template.get_weights(), before, strict=True):
            np.testing.assert_array_equal(found, expected)
        parallel.template.compile(parallel.optimizer, "mae", metrics=["mae"])  # the same optimizer
        expected = np.abs(np.eye(3)[y] - parallel.predict(x, verbose=0)).mean()
        assert parallel.fit(x, np.eye(3)[y], 16, verbose=0).history["loss"] == [pytest.approx(expected, abs=1e-6)]
        assert "traces the model" not in capsys.readouterr().err

    def test_saved_copied_and_checkpointed_it_is_the_template(self, tmp_path):
        parallel = self.parallel()
        x, y = data(8, 4)
        parallel.fit(x, y, verbose=0)
        expected = parallel.predict(x, verbose=0)
        np.testing.assert_allclose(parallel(x), expected, atol=1e-6)
        for name in ("m.keras", "m.h5"):
            keras.models.save_model(parallel, tmp_path / name)
        keras.saving.save_weights(parallel, tmp_path / "m.weights.h5")
        path = tf.train.Checkpoint(model=parallel).save(tmp_path / "c")
        restored = self.parallel().template
        restored.run_eagerly = True
        restored.fit(x, y, verbose=0)
        tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
        loaded = keras.models.clone_model(parallel)
        loaded.load_weights(tmp_path / "m.weights.h5")
        for model in (
            *(keras.models.load_model(tmp_path / name) for name in ("m.keras", "m.h5")),
            pickle.loads(pickle.dumps(parallel)),
            copy.deepcopy(parallel),
            restored,
            loaded,
        ):
            assert type(model) is keras.Sequential
            np.testing.assert_allclose(model(x), expected, atol=1e-6)

    @pytest.mark.parametrize("gpus", [1, 2])
    def test_a_program_ends_a_training_by_the_model_that_it_fits(self, gpus):
        parallel = tower_train.multi_gpu_model(keras.Sequential([keras.layers.Dense(3)]), gpus=gpus)
        parallel.compile("sgd", "mse")

        def stop(epoch, logs):
            parallel.stop_training = epoch == 1

        callback = keras.callbacks.LambdaCallback(on_epoch_end=stop)
        history = parallel.fit(np.ones([8, 4]), np.ones([8, 3]), epochs=4, verbose=0, callbacks=[callback])
        assert history.epoch == [0, 1] and parallel.history is history and parallel.optimizer.iterations.numpy() == 2

    def test_a_lone_tower_is_keras_own_step_unless_it_has_its_weights_elsewhere(self):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])  # on the host here, where there is no GPU
        parallel = tower_train.multi_gpu_model(model, gpus=1)
        parallel.compile("sgd", "mse", jit_compile=True)
        parallel.fit(np.ones([8, 4]), np.ones([8, 3]), verbose=0)
        assert model.train_function and not parallel.train_function
        is_one_device = [
            TowerModel(model, towers, "/cpu:0").is_one_device for towers in (("/gpu:0",), ("/gpu:1",), ("/cpu:0",) * 2)
        ]
        assert is_one_device == [False] * 3

    def test_lines_tell_of_a_forgotten_softmax_and_that_building_the_towers_takes_long(self, monkeypatch, capsys):
        monkeypatch.setattr(step, "_LONG_SECS", 0)
        inputs, activations = keras.Input([4]), {"logits": None, "chances": "softmax", "forgotten": None, "too": None}
        model = keras.Model(inputs, [layers.Dense(3, last, name=name)(inputs) for name, last in activations.items()])
        parallel = tower_train.multi_gpu_model(model, gpus=2)
        x, y = data(8, 4)
        loss = "sparse_categorical_crossentropy"
        parallel.compile("sgd", [CROSS_ENTROPY, loss, loss, loss])
        parallel.fit(x, [y] * 4, verbose=0, epochs=2)
        told = capsys.readouterr().err
        assert told.count("traces the model in each of 2 towers, which takes more") == 1
        for name in ("forgotten", "too"):
            assert told.count(f"its output {name} ends without a softmax or sigmoid, but the loss takes") == 1
        assert told.count("without a softmax") == 2

    def test_attributes_are_those_of_the_template(self):
        inputs = {"left": keras.Input([4], name="left"), "right": keras.Input([3], name="right")}
        both = layers.concatenate(list(inputs.values()))
        outputs = [layers.Dense(2, name="a")(both), layers.Dense(1, name="b")(both)]
        model = keras.Model(inputs, outputs, name="mine")
        parallel = tower_train.multi_gpu_model(model, gpus=2)
        for name in ("inputs", "outputs", "input_shape", "output_shape", "output_names", "layers", "input", "output"):
            found, expected = keras.tree.flatten(getattr(parallel, name)), keras.tree.flatten(getattr(model, name))
            assert len(found) == len(expected) > 0, name
            assert all(a is b or a == b for a, b in zip(found, expected, strict=True)), name
        assert parallel.count_params() == 7 * 3 + 3
        assert parallel.get_layer("a") is parallel.get_layer(index=3) is model.get_layer("a")
        assert (parallel.get_config(), parallel.to_json()) == (model.get_config(), model.to_json())
        for layer in parallel.layers:
            layer.trainable = False
        assert parallel.trainable_weights == []
        assert keras.Model(parallel.input, parallel.get_layer("a").output).output_shape == (None, 2)

    def test_attributes_of_the_users_own(self):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.encoder = layers.Dense(2)
                self.classes = ["cat", "dog"]

            def call(self, inputs):
                return self.encoder(inputs)

            def describe(self):
                return self.classes[0]

        parallel = tower_train.multi_gpu_model(Model(), gpus=2)
        assert parallel.encoder is parallel.template.encoder and parallel.describe() == "cat"
        assert not hasattr(parallel, "output_names") and not hasattr(parallel, "decoder")


def test_towers_compute_on_their_devices_and_weights_stay_on_the_cpu():
    """In a process of its own, since the number of logical devices is fixed once TensorFlow is in use."""
    program = """
        import tensorflow as tf
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3)
        import keras, numpy as np, tower_train
        with tf.device("/cpu:2"):
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        kernel = model.get_weights()[0]
        options = dict(cpu_relocation=True, cpu_merge=False, check_towers="never")
        parallel = tower_train.multi_gpu_model(model, gpus=3, **options)
        np.testing.assert_array_equal(model.get_weights()[0], kernel)
        parallel.compile("adam", "mse")
        step = tf.function(parallel.train_step).get_concrete_function((tf.ones([6, 4]), tf.ones([6, 3])))
        for op in step.graph.get_operations():
            if op.type == "MatMul":
                print(op.name, op.device)
        parallel.fit(np.ones([6, 4]), np.ones([6, 3]), verbose=0)
        print({variable.value.device for variable in model.variables + parallel.optimizer.variables})
    """
    done = jobs.command("-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    *products, variables = done.stdout.splitlines()
    forward = [line for line in products if line.startswith("tower_")]
    assert len(forward) == 3
    for i, line in enumerate(forward):
        assert line.startswith(f"tower_{i}/") and line.endswith(f":{i}"), line
    gradients = [line for line in products if line not in forward]
    assert {line[-1] for line in gradients} == {"0", "1", "2"}
    assert variables == "{'/job:localhost/replica:0/task:0/device:CPU:0'}"


class TestMisuse:
    @pytest.fixture
    def four_gpus(self, monkeypatch):
        there = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(4)]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: there if kind == "GPU" else [])

    def model(self):
        return keras.Sequential([keras.Input([4]), layers.Dense(3)])

    @pytest.mark.parametrize(
        ("gpus", "message"),
        [
            (0, "gpus=0: it must be a count of at least 1"),
            ("2", "at least 1"),
            ([0, -1], "at least 1"),
            (np.array([]), "at least 1"),
            ([0, 0], "list of different GPU ids"),
            ([0, 4], "this program sees 4 GPUs .*Ask for those"),
            (5, "sees 4 GPUs"),
        ],
    )
    def test_gpus_that_cannot_be(self, four_gpus, gpus, message):
        with pytest.raises(ConfigError, match=message):
            tower_train.multi_gpu_model(self.model(), gpus=gpus)

    @pytest.mark.parametrize("gpus", [np.int64(2), [0, 2], np.array([0, 2]), range(2), None])
    def test_counts_and_lists_of_every_kind(self, four_gpus, gpus):
        ids = range(4) if gpus is None else range(gpus) if isinstance(gpus, np.int64) else gpus
        assert tower_train.multi_gpu_model(self.model(), gpus=gpus).towers == tuple(f"/gpu:{i}" for i in ids)

    def test_without_gpus_a_count_makes_towers_on_the_cpu(self, capsys):
        for gpus in (1, None):
            assert tower_train.multi_gpu_model(self.model(), gpus=gpus).towers == ("/cpu:0",)
        assert capsys.readouterr().err == ""
        with pytest.raises(ConfigError, match="this program sees 0 GPUs .*a count makes"):
            tower_train.multi_gpu_model(self.model(), gpus=[0, 2])

    def test_a_layer_with_a_state_of_each_example_is_refused_but_by_one_tower(self, monkeypatch):
        model = keras.Sequential([keras.Input(batch_shape=[4, 2, 4]), layers.SimpleRNN(3, stateful=True)])
        assert tower_train.multi_gpu_model(model, gpus=1).towers == ("/cpu:0",)
        for workers, gpus in ((1, 2), (2, 1)):
            monkeypatch.setattr(exchange, "find", lambda size=workers: types.SimpleNamespace(size=size))
            with pytest.raises(ConfigError, match=f"{model.layers[0].name} has stateful=True, and a tower"):
                tower_train.multi_gpu_model(model, gpus=gpus)

    @pytest.mark.parametrize(
        "output", [lambda x: keras.ops.stack([x[:, 0], x[:, 1]]), lambda x: tf.boolean_mask(x, x < 1e-3)[:3]]
    )
    def test_an_output_whose_first_axis_is_not_the_batch(self, output):
        model = keras.Sequential([keras.Input([4]), layers.Dense(3), layers.Lambda(output, (3,), name="odd")])
        parallel = tower_train.multi_gpu_model(model, gpus=2)
        parallel.compile("sgd", lambda _, outputs: keras.ops.mean(outputs))
        for use in (lambda: parallel.fit(*data(16, 4), verbose=0), lambda: parallel.predict(data(8, 4)[0])):
            with pytest.raises(ConfigError, match="the output odd of shape .* Put the batch first") as caught:
                use()
            assert "\n" not in str(caught.value)

    def test_features_that_a_model_does_not_take_are_one_line(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(3)
                self.dense.build([None, 4])

            def call(self, x):
                return self.dense(x)

        inputs = {"a": keras.Input([4], name="left"), "b": keras.Input([4], name="right")}
        several = keras.Model(inputs, layers.Dense(3)(layers.concatenate(list(inputs.values()))))
        x, y = data(16, 3)
        for model, features, message in (
            (self.model(), x, r"takes float32 \[None, 4\], and the examples give float32 \[None, 3\]"),
            (Own(), x, "'dense.*' is incompatible with the layer: expected axis -1 of input shape to have value 4"),
            (several, {"a": x, "c": x}, "an input 'b', and the examples have the features a, c"),
        ):
            parallel = tower_train.multi_gpu_model(model, gpus=2)
            parallel.compile("sgd", CROSS_ENTROPY)
            with pytest.raises(ConfigError, match=f"^multi_gpu_model: .*{message}") as caught:
                parallel.fit(features, y, verbose=0)
            assert "\n" not in str(caught.value)

    def test_a_scalar_output_is_a_mean_over_examples(self, float64):
        x, y = data(21, 4)
        of_rows = lambda x: keras.ops.mean(x**2)  # noqa: E731
        build = lambda: keras.Sequential([keras.Input([4]), layers.Dense(3), layers.Lambda(of_rows)])  # noqa: E731
        settings = {"optimizer": "sgd", "loss": lambda _, output: output}
        assert_same(fit_both(build, 2, settings, x, y, batch_size=8), 1e-12)

    def test_a_model_of_keras_2(self):
        import tf_keras

        with pytest.raises(ConfigError, match="got a Sequential of Keras 2 .tf_keras.; it needs one of Keras 3"):
            tower_train.multi_gpu_model(tf_keras.Sequential([tf_keras.layers.Dense(1)]), gpus=2)

    def test_what_is_no_model_and_another_strategy_and_eager_steps(self):
        with pytest.raises(ConfigError, match="got a Dense"):
            tower_train.multi_gpu_model(layers.Dense(3), gpus=2)
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(ConfigError, match="leave the scope"):
            tower_train.multi_gpu_model(self.model(), gpus=2)
        eager = self.model()
        eager.compile("sgd", "mse", run_eagerly=True)
        parallel = tower_train.multi_gpu_model(self.model(), gpus=2)
        for use in (
            lambda: tower_train.multi_gpu_model(eager, gpus=2),
            lambda: parallel.compile("sgd", "mse", run_eagerly=True),
        ):
            with pytest.raises(
                ConfigError, match="run_eagerly=True: the towers' step is a graph .*; to debug, fit the"
            ):
                use()

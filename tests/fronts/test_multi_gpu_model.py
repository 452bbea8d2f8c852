"""multi_gpu_model trains what Keras' own fit trains on one device, whatever the model, the data and the towers."""

import csv
import json
import subprocess
import sys
import textwrap
import zipfile

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train.errors import ConfigError
from tower_train.fronts import replicas

layers = keras.layers
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.002),
    "adam": lambda: keras.optimizers.Adam(0.002),
}
rng = np.random.default_rng(0)


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def data(count, *shape, classes=3):
    """Random features and labels."""
    return rng.normal(size=[count, *shape]).astype(keras.config.floatx()), rng.integers(0, classes, count)


def small_network():
    return keras.Sequential(
        [
            keras.Input([6, 6, 2]),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.Flatten(),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.01)),
        ]
    )


def twins(build):
    """Two models with the same initial weights."""
    keras.utils.set_random_seed(1)
    one = build()
    keras.utils.set_random_seed(1)
    return one, build()


def fit_both(build, gpus, compile_args, *fit_args, **fit_kwargs):
    """Trains one twin by Keras' own fit and the other in towers: (model, History), (template, History)."""
    (one, template), runs_of = twins(build), []
    parallel = tower_train.multi_gpu_model(template, gpus=gpus)
    for trained, owner in ((one, one), (parallel, template)):
        keras.utils.set_random_seed(2)
        trained.compile(**(compile_args() if callable(compile_args) else compile_args))
        runs_of.append((owner, trained.fit(*fit_args, **({"verbose": 0, "shuffle": False} | fit_kwargs))))
    return runs_of


def assert_same(trained, atol):
    (one, one_history), (template, history) = trained
    assert len(one.weights) == len(template.weights) > 0
    for expected, weight in zip(one.weights, template.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), atol=atol, rtol=0, err_msg=weight.path)
    assert history.history.keys() == one_history.history.keys()
    for name, values in one_history.history.items():
        np.testing.assert_allclose(history.history[name], values, atol=10 * atol, rtol=0, err_msg=name)


class TestTrainingEqualsKeras:
    CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def fifty_steps(self, optimizer, gpus):
        x, y = data(45, 6, 6, 2)  # batches of 8 and one of 5, which two or three towers cannot share out evenly
        return fit_both(
            small_network, gpus,
            lambda: dict(optimizer=OPTIMIZERS[optimizer](), loss=self.CROSS_ENTROPY, metrics=["accuracy"]),
            x, y, batch_size=10, epochs=10,
        )  # fmt: skip

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_after_50_steps_in_float32(self, optimizer):
        assert_same(self.fifty_steps(optimizer, 2), 1e-5)

    @pytest.mark.parametrize(("optimizer", "gpus"), [*((name, 3) for name in OPTIMIZERS), ("adam", 1)])
    def test_after_50_steps_in_float64(self, float64, optimizer, gpus):
        assert_same(self.fifty_steps(optimizer, gpus), 1e-9)

    def test_with_weights_of_samples_and_of_classes_and_validation_data(self, float64):
        x, y = data(22, 6, 6, 2)
        loss = {"optimizer": "sgd", "loss": self.CROSS_ENTROPY, "weighted_metrics": ["accuracy"]}
        weights = rng.uniform(0, 2, 22)
        assert_same(fit_both(small_network, 3, loss, x, y, 8, sample_weight=weights, validation_split=0.3), 1e-9)
        assert_same(
            fit_both(small_network, 3, loss, x, y, 8, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, validation_data=(x, y)),
            1e-9,
        )

    def test_on_datasets_generators_and_py_datasets(self, float64):
        x, y = data(14, 6, 6, 2)
        loss = {"optimizer": "sgd", "loss": self.CROSS_ENTROPY, "steps_per_execution": 2}
        batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 14, 4)]

        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return len(batches)

            def __getitem__(self, index):
                return batches[index]

        keras.utils.set_random_seed(1)
        model = small_network()
        model.compile(**loss)
        expected = (model, model.fit(x, y, batch_size=4, shuffle=False, verbose=0))
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        for source in (dataset, Batches(), (batch for batch in batches)):
            keras.utils.set_random_seed(1)
            parallel = tower_train.multi_gpu_model(small_network(), gpus=3)
            parallel.compile(**loss)
            history = parallel.fit(source, steps_per_epoch=4, shuffle=False, verbose=0)
            assert_same([expected, (parallel.template, history)], 1e-9)

    def test_with_fewer_examples_than_towers(self, float64):
        x, y = data(9, 6, 6, 2)  # 5 examples, then 4, for 5 towers
        assert_same(fit_both(small_network, 5, {"optimizer": "adam", "loss": self.CROSS_ENTROPY}, x, y, 5), 1e-9)
        one, template = twins(small_network)
        parallel = tower_train.multi_gpu_model(template, gpus=5)
        for model in (one, parallel):
            model.compile("adam", self.CROSS_ENTROPY)
        np.testing.assert_allclose(parallel.train_on_batch(x[:1], y[:1]), one.train_on_batch(x[:1], y[:1]), atol=1e-9)
        np.testing.assert_allclose(template.get_weights()[0], one.get_weights()[0], atol=1e-9)

    def test_where_the_loss_is_no_mean_over_examples(self, float64):
        x, y = data(20, 6, 6, 2)

        def sharpest(y_true, y_pred):
            losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
            return keras.ops.logsumexp(losses)

        assert_same(fit_both(small_network, 3, {"optimizer": "sgd", "loss": sharpest}, x, y, batch_size=8), 1e-9)

    def test_with_mixed_precision_and_loss_scaling(self):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            x, y = data(16, 6, 6, 2)
            loss = {"optimizer": "sgd", "loss": self.CROSS_ENTROPY}
            trained = fit_both(small_network, 2, loss, x, y, batch_size=8, epochs=2)
        finally:
            keras.config.set_dtype_policy("float32")
        assert_same(trained, 2e-3)


class TestModels:
    """Whatever the model is made of, two or three towers train what Keras trains."""

    def test_several_inputs_and_outputs_with_a_shared_layer_in_a_nested_model(self, float64):
        def build():
            inner = keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), layers.Dense(3)], name="inner")
            inputs = {"left": keras.Input([4], name="left"), "right": keras.Input([4], name="right")}
            left, right = inner(inputs["left"]), inner(inputs["right"])
            both = layers.concatenate([left, right])
            return keras.Model(inputs, {"sum": layers.Dense(1, name="sum")(both), "class": layers.Softmax()(left)})

        x = {"left": data(11, 4)[0], "right": data(11, 4)[0]}
        y = {"sum": data(11, 1)[0], "class": data(11)[1]}
        settings = {
            "optimizer": "adam",
            "loss": {"sum": "mse", "class": "sparse_categorical_crossentropy"},
            "loss_weights": {"sum": 0.3, "class": 1.0},
            "metrics": {"sum": ["mae"], "class": ["accuracy"]},
        }
        assert_same(fit_both(build, 3, settings, x, y, batch_size=4, epochs=3), 1e-9)

    def test_a_subclassed_model_that_adds_losses_and_is_built_by_its_first_batch(self, float64):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.first = layers.Dense(4, activity_regularizer="l2", bias_regularizer="l1")
                self.last = layers.Dense(3)

            def call(self, x):
                hidden = self.first(x)
                self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
                return self.last(hidden)

        x, y = data(7, 4)
        settings = {"optimizer": "sgd", "loss": TestTrainingEqualsKeras.CROSS_ENTROPY}
        assert_same(fit_both(Model, 2, settings, x, y, batch_size=4, epochs=3), 1e-9)

    def test_masked_sequences_with_an_embedding_and_a_recurrent_layer(self, float64):
        def build():
            return keras.Sequential(
                [keras.Input([6], dtype="int32"), layers.Embedding(9, 4, mask_zero=True),
                 layers.GRU(3, return_sequences=True), layers.Dense(1)]
            )  # fmt: skip

        x = rng.integers(1, 9, [10, 6]) * (np.arange(6) < rng.integers(1, 7, [10, 1]))
        y = rng.normal(size=[10, 6, 1])
        settings = {"optimizer": "rmsprop", "loss": "mse", "metrics": ["mae"]}
        assert_same(fit_both(build, 3, settings, x, y, batch_size=5, epochs=3), 1e-9)

    def test_frozen_layers_stay_and_unused_weights_are_named(self, capsys):
        def build():
            inputs = keras.Input([4])
            hidden = layers.Dense(4, trainable=False)(inputs)
            return keras.Model(inputs, [layers.Dense(3)(hidden), layers.Dense(2, name="unused")(hidden)])

        x, y = data(8, 4)
        settings = {"optimizer": "adam", "loss": [TestTrainingEqualsKeras.CROSS_ENTROPY, None]}
        before = twins(build)[0].get_weights()[0]
        trained = fit_both(build, 2, settings, x, [y, y], batch_size=4)
        assert_same(trained, 1e-6)
        np.testing.assert_array_equal(trained[1][0].get_weights()[0], before)
        assert "unused/kernel" in capsys.readouterr().err

    def test_dropout_of_one_tower_is_keras_own_and_towers_draw_different_masks(self):
        def build():
            return keras.Sequential([keras.Input([50]), layers.Dropout(0.5, seed=3), layers.Dense(2)])

        x, y = data(12, 50)
        settings = {"optimizer": "sgd", "loss": "mse"}
        assert_same(fit_both(build, 1, settings, x, data(12, 2)[0], batch_size=4, epochs=3), 1e-6)

        dropout = keras.Sequential([keras.Input([100]), layers.Dropout(0.5, seed=3)])
        state = dropout.layers[0].seed_generator.state
        towers = replicas.run(dropout, tf.ones([6, 100]), ["/cpu:0"] * 3, training=True)
        kept = [tower.outputs.numpy() > 0 for tower in towers]
        for i, j in [(0, 1), (0, 2), (1, 2)]:
            assert 0.3 < np.mean(kept[i] == kept[j]) < 0.7
        before = state.numpy()
        replicas.assign_merged(dropout, towers)
        np.testing.assert_array_equal(state.numpy() - before, [0, 1])

    @pytest.mark.parametrize("examples", [7, 2])
    def test_batch_normalisation_averages_move_to_the_mean_over_examples(self, examples):
        model = keras.Sequential([keras.Input([2]), layers.BatchNormalization(momentum=0.9)])
        parallel = tower_train.multi_gpu_model(model, gpus=3)
        parallel.compile("sgd", "mse")
        x, _ = data(examples, 2)
        parallel.train_on_batch(x, x)
        parts = [part for part in np.array_split(x, 3) if len(part)]
        of_tower = np.array([len(part) / examples for part in parts])
        mean = of_tower @ [part.mean(0) for part in parts]
        variance = of_tower @ [part.var(0) for part in parts]
        gamma, beta, moving_mean, moving_variance = model.get_weights()
        np.testing.assert_allclose(moving_mean, 0.1 * mean, atol=1e-6)
        np.testing.assert_allclose(moving_variance, 0.9 + 0.1 * variance, atol=1e-6)

    def test_batch_normalisation_in_one_tower_is_keras_own(self, float64):
        def build():
            return keras.Sequential(
                [keras.Input([6, 6, 2]), layers.Conv2D(3, 3), layers.BatchNormalization(), layers.Flatten(),
                 layers.Dense(3)]
            )  # fmt: skip

        x, y = data(20, 6, 6, 2)
        settings = {"optimizer": "sgd", "loss": TestTrainingEqualsKeras.CROSS_ENTROPY}
        assert_same(fit_both(build, 1, settings, x, y, batch_size=8, epochs=4, validation_split=0.2), 1e-9)


class TestUse:
    def parallel(self, gpus=2, **kwargs):
        model = keras.Sequential([keras.Input([4]), layers.Dense(8, "relu"), layers.Dense(3, "softmax")])
        parallel = tower_train.multi_gpu_model(model, gpus=gpus, **kwargs)
        parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return parallel

    @pytest.mark.parametrize("options", [{}, {"cpu_merge": False}, {"cpu_relocation": True}])
    def test_predict_and_evaluate_are_those_of_the_template(self, options):
        parallel = self.parallel(3, **options)
        x, y = data(10, 4)
        expected = parallel.template.predict(x, verbose=0)
        np.testing.assert_allclose(parallel.predict(x, batch_size=4, verbose=0), expected, atol=1e-6)
        np.testing.assert_allclose(parallel(x), expected, atol=1e-6)
        found = parallel.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
        assert found["accuracy"] == pytest.approx(np.mean(expected.argmax(1) == y), abs=1e-6)
        assert found["loss"] == pytest.approx(-np.log(expected[np.arange(10), y]).mean(), abs=1e-5)

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
            for found, expected in zip(saved.get_weights(), weights, strict=True):
                np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(parallel.get_weights()[0], seen[0][0])
        parallel.load_weights(tmp_path / "2.weights.h5")
        np.testing.assert_array_equal(parallel.template.get_weights()[0], seen[1][0])

    def test_what_is_saved_is_the_plain_model_with_its_optimizer(self, tmp_path):
        parallel = self.parallel()
        x, y = data(20, 4)
        parallel.fit(x, y, batch_size=8, epochs=2, verbose=0)
        for owner in (parallel, parallel.template):
            owner.save(tmp_path / "model.keras")
            assert "tower" not in zipfile.ZipFile(tmp_path / "model.keras").read("config.json").decode()
            loaded = keras.models.load_model(tmp_path / "model.keras")
            assert type(loaded) is keras.Sequential
            assert loaded.optimizer.iterations == 6
            np.testing.assert_allclose(loaded.predict(x, verbose=0), parallel.predict(x, verbose=0), atol=1e-6)
        assert json.loads(parallel.to_json())["class_name"] == "Sequential"

    def test_the_progress_bar_the_summary_and_the_callers_eager_mode_stay(self, capsys):
        parallel = self.parallel()
        x, y = data(20, 4)
        parallel.fit(x, y, batch_size=8, epochs=2)
        shown = capsys.readouterr().out
        assert "Epoch 2/2" in shown and "3/3" in shown and "accuracy" in shown
        parallel.summary()
        assert "2 towers: /cpu:0, /cpu:0" in capsys.readouterr().out
        assert tf.executing_eagerly() and tf.compat.v1.get_default_session() is None
        assert (tf.constant(1) + 1).numpy() == 2

    def test_a_template_can_be_trained_further_by_keras_itself(self):
        parallel = self.parallel()
        x, y = data(20, 4)
        parallel.fit(x, y, batch_size=8, verbose=0)
        before = parallel.predict(x, verbose=0)
        parallel.template.fit(x, y, batch_size=8, verbose=0)
        after = parallel.predict(x, verbose=0)
        assert np.abs(after - before).max() > 1e-4
        np.testing.assert_allclose(after, parallel.template.predict(x, verbose=0), atol=1e-6)

    def test_a_step_can_be_debugged_eagerly(self):
        one, template = twins(lambda: keras.Sequential([keras.Input([4]), layers.Dense(3)]))
        parallel = tower_train.multi_gpu_model(template, gpus=2)
        x, y = data(5, 4)
        for model in (one, parallel):
            model.compile("sgd", TestTrainingEqualsKeras.CROSS_ENTROPY, run_eagerly=model is parallel)
            model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        np.testing.assert_allclose(template.get_weights()[0], one.get_weights()[0], atol=1e-6)


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
        parallel = tower_train.multi_gpu_model(model, gpus=3, cpu_relocation=True, cpu_merge=False)
        np.testing.assert_array_equal(model.get_weights()[0], kernel)
        parallel.compile("adam", "mse")
        step = tf.function(parallel.train_step).get_concrete_function((tf.ones([6, 4]), tf.ones([6, 3])))
        for op in step.graph.get_operations():
            if op.type == "MatMul":
                print(op.name, op.device)
        parallel.fit(np.ones([6, 4]), np.ones([6, 3]), verbose=0)
        print({variable.value.device for variable in model.variables + parallel.optimizer.variables})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=jobs.environment(), capture_output=True, text=True,
        timeout=jobs.WAIT_SECS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *products, variables = done.stdout.splitlines()
    forward = [line for line in products if line.startswith("tower_")]
    assert len(forward) == 3
    for i, line in enumerate(forward):
        assert line.startswith(f"tower_{i}/") and line.endswith(f":{i}"), line
    gradients = [line for line in products if line not in forward]
    assert sorted(line[-1] for line in gradients) == ["0", "1", "2"]
    assert variables == "{'/job:localhost/replica:0/task:0/device:CPU:0'}"


class TestMisuse:
    def model(self):
        return keras.Sequential([keras.Input([4]), layers.Dense(3)])

    @pytest.mark.parametrize(
        ("gpus", "message"),
        [(0, "gpus=0: it must be a count of at least 1"), (-1, "at least 1"), ([], "at least 1"), ("2", "at least 1"),
         (2.0, "at least 1"), ([0, 0], "names a GPU twice"), ([0, 2], "this program sees 0 GPUs .*a count makes")],
    )  # fmt: skip
    def test_gpus_that_cannot_be(self, gpus, message):
        with pytest.raises(ConfigError, match=message):
            tower_train.multi_gpu_model(self.model(), gpus=gpus)

    @pytest.mark.parametrize("gpus", [3, [0, 2]])
    def test_more_gpus_than_there_are(self, monkeypatch, gpus):
        there = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(2)]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: there if kind == "GPU" else [])
        with pytest.raises(ConfigError, match=r"this program sees 2 GPUs \(0, 1\)\. Ask for those"):
            tower_train.multi_gpu_model(self.model(), gpus=gpus)

    def test_the_chosen_gpus_keep_their_numbers(self, monkeypatch):
        there = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(4)]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: there if kind == "GPU" else [])
        assert tower_train.multi_gpu_model(self.model(), gpus=[0, 2]).towers == ("/gpu:0", "/gpu:2")
        assert len(tower_train.multi_gpu_model(self.model()).towers) == 4

    def test_fit_before_compile(self):
        with pytest.raises(ValueError, match="call `compile\\(\\)`"):
            tower_train.multi_gpu_model(self.model(), gpus=2).fit(np.ones([4, 4]), np.ones([4, 3]))

    def test_a_batch_smaller_than_the_towers(self):
        parallel = tower_train.multi_gpu_model(self.model(), gpus=4)
        parallel.compile("sgd", "mse")
        with pytest.raises(ConfigError, match="batch_size=3 is the global batch, which 4 towers share out"):
            parallel.fit(np.ones([8, 4]), np.ones([8, 3]), batch_size=3)

    def test_a_model_with_a_training_step_of_its_own(self):
        class Own(keras.Model):
            def train_step(self, data):
                return {}

        with pytest.raises(ConfigError, match="Own defines its own train_step"):
            tower_train.multi_gpu_model(Own(), gpus=2)

    def test_what_is_no_model_and_another_strategy_and_xla(self):
        with pytest.raises(ConfigError, match="got a Dense"):
            tower_train.multi_gpu_model(layers.Dense(3), gpus=2)
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(ConfigError, match="leave the scope"):
            tower_train.multi_gpu_model(self.model(), gpus=2)
        with pytest.raises(ConfigError, match="jit_compile"):
            tower_train.multi_gpu_model(self.model(), gpus=2).compile("sgd", "mse", jit_compile=True)

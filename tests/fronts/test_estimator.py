"""The Estimator keeps what TensorFlow 1.15 documented, on one tower and on several."""

import os
import pathlib

import jobs
import numpy as np
import pytest
import tensorflow as tf

from tower_train import errors, layers
from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
TRAIN, EVAL, PREDICT = tf_estimator.ModeKeys.TRAIN, tf_estimator.ModeKeys.EVAL, tf_estimator.ModeKeys.PREDICT
rng = np.random.default_rng(0)
X = rng.normal(size=[48, 3])
Y = X @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=48)
BATCH, RATE, MOMENTUM = 4, 2**-5, 0.875  # rates that float32, in which optimizers keep them, holds exactly


def input_fn(batch=BATCH, epochs=1, count=48):
    return tf.data.Dataset.from_tensor_slices(({"x": X[:count]}, Y[:count])).repeat(epochs).batch(batch)


def model_fn(features, labels, mode, params):
    """Linear regression in float64, of one get_variable and one tf.Variable, for one device."""
    weights = v1.get_variable("weights", [3], tf.float64, v1.zeros_initializer())
    bias = tf.Variable(np.float64(0), name="bias")
    y = tf.add(tf.linalg.matvec(features["x"], weights), bias, name="prediction")
    if mode == PREDICT:
        return tf_estimator.EstimatorSpec(mode, {"y": y, "twice": 2 * y})
    loss = tf.reduce_mean(tf.square(y - labels), name="squared_error")
    if mode == EVAL:
        metrics = {"mae": v1.metrics.mean_absolute_error(labels, y)}
        return tf_estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = v1.train.MomentumOptimizer(params.get("rate", RATE), MOMENTUM)
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def make(model_dir, towers=1, fn=model_fn, params=None, **config):
    config = tf_estimator.RunConfig(**({"num_gpus": towers, "tf_random_seed": 1} | config))
    return tf_estimator.Estimator(fn, model_dir, config, params)


def expected_weights(steps, towers=1, rate=RATE):
    """The weights and the bias after some steps, in numpy: the batches of all towers are one batch."""
    inputs, values, velocity = np.c_[X, np.ones(48)], np.zeros(4), np.zeros(4)
    for step in range(steps):
        rows = np.arange(step * BATCH * towers, (step + 1) * BATCH * towers) % 48
        grad = 2 * inputs[rows].T @ (inputs[rows] @ values - Y[rows]) / len(rows)
        velocity = MOMENTUM * velocity + grad
        values = values - rate * velocity
    return values


def weights_of(estimator):
    return np.append(estimator.get_variable_value("weights"), estimator.get_variable_value("bias"))


class Recorder(v1.train.SessionRunHook):
    """Notes what is called when, and the values of tensors that it knows by name."""

    def __init__(self, log, name="", stop_after=None):
        self.log, self._name, self._stop_after, self.losses = log, name, stop_after, []

    def begin(self):
        self.log.append(f"{self._name}begin")
        self._loss = v1.get_default_graph().get_tensor_by_name("squared_error:0")

    def after_create_session(self, session, coord):
        self.log.append(f"{self._name}after_create_session")

    def before_run(self, run_context):
        self.log.append(f"{self._name}before_run")
        return v1.train.SessionRunArgs(self._loss)

    def after_run(self, run_context, run_values):
        self.log.append(f"{self._name}after_run")
        self.losses.append(run_values.results)
        if len(self.losses) == self._stop_after:
            run_context.request_stop()

    def end(self, session):
        self.log.append(f"{self._name}end")


class TestTraining:
    @pytest.mark.parametrize("towers", [1, 2, 3])
    def test_towers_train_the_weights_of_one_device_on_their_joined_batches(self, tmp_path, towers):
        estimator = make(tmp_path, towers)
        assert estimator.train(lambda: input_fn(epochs=3)) is estimator
        steps = 36 // towers
        np.testing.assert_allclose(weights_of(estimator), expected_weights(steps, towers), atol=1e-12)
        assert estimator.get_variable_value("global_step") == steps
        assert sorted(estimator.get_variable_names()) == [
            "bias", "bias/Momentum", "global_step", "weights", "weights/Momentum",
        ]  # fmt: skip

    def test_batches_that_do_not_suffice_for_all_towers_are_left_out(self, tmp_path):
        estimator = make(tmp_path, towers=5)
        estimator.train(input_fn)  # 12 batches
        np.testing.assert_allclose(weights_of(estimator), expected_weights(2, 5), atol=1e-12)

    def test_steps_count_from_here_and_max_steps_from_the_first_step(self, tmp_path):
        for kwargs, expected in [({"steps": 3}, 3), ({"steps": 3}, 6), ({"max_steps": 8}, 8), ({"max_steps": 8}, 8)]:
            estimator = make(tmp_path, 2).train(lambda: input_fn(epochs=None), **kwargs)
            assert estimator.get_variable_value("global_step") == expected

    def test_a_resumed_run_goes_on_with_the_weights_and_the_momentum(self, tmp_path):
        for end in (4, 9):
            make(tmp_path, 2).train(lambda end=end: input_fn(epochs=None).skip(2 * (end - 4)), max_steps=end)
        inputs, values, velocity = np.c_[X, np.ones(48)], np.zeros(4), np.zeros(4)
        steps = [np.arange(8 * i, 8 * i + 8) % 48 for i in range(4)]
        steps += [np.arange(40 + 8 * i, 48 + 8 * i) % 48 for i in range(5)]
        for step in steps:
            grad = 2 * inputs[step].T @ (inputs[step] @ values - Y[step]) / 8
            velocity = MOMENTUM * velocity + grad
            values = values - RATE * velocity
        np.testing.assert_allclose(weights_of(make(tmp_path)), values, atol=1e-12)

    def test_hooks_are_called_in_order_and_find_tensors_by_the_models_own_names(self, tmp_path):
        log, saves = [], []

        class Listener(v1.train.CheckpointSaverListener):
            def before_save(self, session, step):
                saves.append(f"before {step}")

            def after_save(self, session, step):
                saves.append(f"after {step}")

        first, second = Recorder(log, "1:"), Recorder(log, "2:", stop_after=2)
        estimator = make(tmp_path, 2, save_checkpoints_steps=1)
        estimator.train(lambda: input_fn(epochs=None), hooks=[first, second], saving_listeners=[Listener()])
        stages = ["begin", "after_create_session", *["before_run", "after_run"] * 2, "end"]
        assert log == [f"{i}:{stage}" for stage in stages for i in (1, 2)]
        assert first.losses[0] == pytest.approx(np.mean(Y[:BATCH] ** 2))  # the first tower's, at weights 0
        assert saves == [f"{when} {step}" for step in range(3) for when in ("before", "after")]

    def test_the_reported_loss_is_the_mean_over_towers(self, tmp_path):
        make(tmp_path, 3, save_summary_steps=1).train(input_fn, steps=1)
        [event] = jobs.events(tmp_path).Scalars("loss")
        assert event.value == pytest.approx(np.mean(Y[: 3 * BATCH] ** 2))
        assert jobs.events(tmp_path).Tags()["scalars"] == ["loss"]

    def test_large_arrays_of_the_input_do_not_get_into_the_files(self, tmp_path):
        large = np.tile(X, [1000, 1])  # 1.1 MB

        def large_input_fn():
            return tf.data.Dataset.from_tensor_slices(({"x": large}, np.tile(Y, 1000))).batch(BATCH)

        estimator = make(tmp_path, 2).train(large_input_fn, steps=3)
        np.testing.assert_allclose(weights_of(estimator), expected_weights(3, 2), atol=1e-12)
        assert max(path.stat().st_size for path in tmp_path.iterdir()) < large.nbytes / 2

    def test_checkpoints_are_kept_as_configured(self, tmp_path):
        make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=3).train(input_fn)
        assert jobs.saved_steps(tmp_path) == [8, 10, 12]

    def test_params_and_config_reach_model_fn_and_input_fn(self, tmp_path):
        def with_config(features, labels, mode, params, config):
            assert config.num_gpus == 2 and config.model_dir == str(tmp_path)
            return model_fn(features, labels, mode, params)

        params = {"rate": 2**-7, "epochs": 2}
        estimator = make(tmp_path, 2, with_config, params)
        params["rate"] = 77  # the Estimator has a copy
        estimator.train(lambda params, mode: input_fn(epochs=params["epochs"] if mode == TRAIN else 1))
        np.testing.assert_allclose(weights_of(estimator), expected_weights(12, 2, rate=2**-7), atol=1e-12)

    def test_a_checkpoint_to_start_from(self, tmp_path):
        trained = make(tmp_path / "one").train(input_fn)
        config = tf_estimator.RunConfig(model_dir=tmp_path / "two")
        settings = tf_estimator.WarmStartSettings(trained.model_dir, vars_to_warm_start="weights")
        warm = tf_estimator.Estimator(model_fn, config=config, params={"rate": 1e-30}, warm_start_from=settings)
        warm.train(input_fn, steps=1)
        np.testing.assert_allclose(warm.get_variable_value("weights"), expected_weights(12)[:3], atol=1e-12)
        assert abs(warm.get_variable_value("bias")) < 1e-12

    def test_what_is_not_finite_stops_the_run_before_it_changes_the_weights(self, tmp_path):
        def bad_batch():
            y = Y.copy()
            y[21] = np.nan  # of the 6th batch: step 3 of two towers, in the second tower
            return tf.data.Dataset.from_tensor_slices(({"x": X}, y)).batch(BATCH)

        with pytest.raises(errors.NonFiniteError, match="not finite at step 3: tower_1: the loss"):
            make(tmp_path, 2, save_checkpoints_steps=1).train(bad_batch)
        np.testing.assert_allclose(weights_of(make(tmp_path)), expected_weights(2, 2), atol=1e-12)


class TestModelFns:
    def test_one_with_its_own_train_op_of_clipped_gradients_and_ordered_averages(self, tmp_path):
        """Each tower clips its own gradients, as under MirroredStrategy; averages follow the update, once a step."""

        def clipped(features, labels, mode, params):
            w = v1.get_variable("w", [3], tf.float64, v1.zeros_initializer())
            loss = tf.reduce_mean(tf.square(tf.linalg.matvec(features["x"], w) - labels))
            optimizer = v1.train.GradientDescentOptimizer(0.125)
            pairs = [(tf.clip_by_norm(grad, 0.5), v) for grad, v in optimizer.compute_gradients(loss)]
            applied = optimizer.apply_gradients(pairs, v1.train.get_global_step())
            averages = tf.train.ExponentialMovingAverage(0.5)
            with tf.control_dependencies([applied]):
                return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=averages.apply([w]))

        estimator = make(tmp_path, 2, clipped)
        estimator.train(input_fn)
        w, average = np.zeros(3), np.zeros(3)
        for step in range(6):
            grads = []
            for begin in (8 * step, 8 * step + 4):
                x, y = X[begin : begin + 4], Y[begin : begin + 4]
                grad = 2 * x.T @ (x @ w - y) / 4
                grads.append(grad * min(1, 0.5 / np.linalg.norm(grad)))
            w = w - 0.125 * np.mean(grads, axis=0)
            average = 0.5 * average + 0.5 * w
        np.testing.assert_allclose(estimator.get_variable_value("w"), w, atol=1e-12)
        np.testing.assert_allclose(estimator.get_variable_value("w/ExponentialMovingAverage"), average, atol=1e-12)

    def test_one_with_regularizers_losses_and_update_ops_in_collections(self, tmp_path):
        """A tower's total loss holds its own losses only, and update ops run once a step."""

        def collected(features, labels, mode):
            w = v1.get_variable(
                "w", [3], tf.float32, v1.ones_initializer(), regularizer=lambda w: 0.1 * tf.reduce_sum(w**2)
            )
            runs_so_far = v1.get_variable("runs", [], tf.int64, v1.zeros_initializer(), trainable=False)
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, runs_so_far.assign_add(1))
            v1.losses.mean_squared_error(labels, tf.linalg.matvec(tf.cast(features["x"], tf.float32), w))
            loss = v1.losses.get_total_loss()
            with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
                optimizer = v1.train.GradientDescentOptimizer(0.1)
                train_op = optimizer.minimize(loss, v1.train.get_global_step())
            return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        estimator = make(tmp_path, 2, collected)
        estimator.train(input_fn, steps=3)
        w = np.ones(3)
        for step in range(3):
            x, y = X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
            w = w - 0.1 * (2 * x.T @ (x @ w - y) / 8 + 0.2 * w)
        np.testing.assert_allclose(estimator.get_variable_value("w"), w, atol=1e-6)
        assert estimator.get_variable_value("runs") == 3

    def test_one_of_keras_layers_keeps_its_names_and_its_moving_averages(self, tmp_path):
        def of_layers(features, labels, mode):
            hidden = tf.keras.layers.BatchNormalization(momentum=0.5)(features["x"], training=mode == TRAIN)
            y = tf.keras.layers.Dense(1, kernel_initializer="he_normal")(hidden)
            loss = v1.losses.mean_squared_error(labels[:, tf.newaxis], y)
            if mode == EVAL:
                return tf_estimator.EstimatorSpec(mode, loss=loss)
            train_op = v1.train.AdamOptimizer().minimize(loss, v1.train.get_global_step())
            return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        tf.keras.layers.Dense(2)  # what else the program makes does not count
        estimator = make(tmp_path, 2, of_layers)
        estimator.train(input_fn, steps=1)
        [mean] = [name for name in estimator.get_variable_names() if name.endswith("moving_mean")]
        np.testing.assert_allclose(estimator.get_variable_value(mean), 0.5 * X[:BATCH].mean(0), atol=1e-6)
        assert estimator.evaluate(input_fn)["global_step"] == 1
        estimator.train(input_fn, steps=1)
        assert len([name for name in estimator.get_variable_names() if name.endswith("kernel")]) == 1


class TestEvaluateAndPredict:
    @pytest.fixture(scope="class")
    def trained(self, tmp_path_factory):
        return make(tmp_path_factory.mktemp("trained"), 2).train(input_fn)

    def errors_of(self, count=48):
        values = expected_weights(6, 2)
        return X[:count] @ values[:3] + values[3] - Y[:count]

    def test_metrics_are_over_all_batches_and_the_loss_is_their_mean(self, trained):
        found = trained.evaluate(lambda: input_fn(batch=20), name="test")
        by_batch = np.split(self.errors_of() ** 2, [20, 40])
        assert found.keys() == {"mae", "loss", "global_step"}
        assert found["mae"] == pytest.approx(np.abs(self.errors_of()).mean(), abs=1e-6)
        assert found["loss"] == pytest.approx(np.mean([batch.mean() for batch in by_batch]), abs=1e-6)
        assert found["global_step"] == 6
        [event] = jobs.events(pathlib.Path(trained.model_dir, "eval_test")).Scalars("mae")
        assert (event.step, event.value) == (6, pytest.approx(found["mae"]))

    def test_steps_bound_an_evaluation(self, trained):
        log = []
        found = trained.evaluate(lambda: input_fn(batch=8), steps=2, hooks=[Recorder(log)])
        assert found["mae"] == pytest.approx(np.abs(self.errors_of(16)).mean(), abs=1e-6)
        assert log == ["begin", "after_create_session", *["before_run", "after_run"] * 2, "end"]

    def test_an_older_checkpoint(self, trained):
        found = trained.evaluate(input_fn, checkpoint_path=os.path.join(trained.model_dir, "model.ckpt-0"))
        assert found["mae"] == pytest.approx(np.abs(Y).mean(), abs=1e-6)

    def test_predict_yields_examples_by_keys_and_leaves_the_callers_graph_alone(self, trained):
        predictions = trained.predict(lambda: input_fn(batch=7))
        first = next(predictions)
        assert tf.executing_eagerly() and v1.get_default_session() is None
        rest = list(predictions)
        assert first.keys() == {"y", "twice"} and len(rest) == 47
        np.testing.assert_allclose([p["y"] for p in [first, *rest]], self.errors_of() + Y, atol=1e-9)
        chosen = list(trained.predict(input_fn, predict_keys=["twice"], yield_single_examples=False))
        assert [batch["twice"].shape for batch in chosen] == [(4,)] * 12 and chosen[0].keys() == {"twice"}

    def test_an_export_reloads_in_eager_tensorflow(self, trained, tmp_path):
        receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
        (tmp_path / "notes.txt").write_text("hello")
        path = trained.export_saved_model(tmp_path, receiver, assets_extra={"notes.txt": tmp_path / "notes.txt"})
        serve = tf.saved_model.load(path.decode()).signatures["serving_default"]
        np.testing.assert_allclose(serve(x=tf.constant(X))["y"], self.errors_of() + Y, atol=1e-9)
        assert pathlib.Path(path.decode(), "assets.extra", "notes.txt").read_text() == "hello"
        parsing = tf_estimator.export.build_parsing_serving_input_receiver_fn(
            {"x": tf.io.FixedLenFeature([3], tf.float32)}
        )
        with pytest.raises(TypeError):  # the model computes in float64: nothing is converted behind its back
            trained.export_saved_model(tmp_path, parsing)


class TestTrainAndEvaluate:
    def test_evaluates_and_exports_what_it_trains(self, tmp_path):
        receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
        better = []

        def is_better(best, now):
            better.append((best["loss"], now["loss"]))
            return now["loss"] < best["loss"]

        exporters = [
            tf_estimator.LatestExporter("latest", receiver, exports_to_keep=1),
            tf_estimator.FinalExporter("final", receiver),
            tf_estimator.BestExporter("best", receiver, compare_fn=is_better),
        ]
        estimator = make(tmp_path, 2, save_checkpoints_steps=4)
        result, exported = tf_estimator.train_and_evaluate(
            estimator,
            tf_estimator.TrainSpec(lambda: input_fn(epochs=None), max_steps=8),
            tf_estimator.EvalSpec(input_fn, steps=None, exporters=exporters, throttle_secs=0),
        )
        assert result["global_step"] == 8
        assert [event.step for event in jobs.events(tmp_path / "eval").Scalars("mae")] == [4, 8]
        assert [len(list((tmp_path / "export" / name).iterdir())) for name in ("latest", "final")] == [1, 1]
        assert exported[1].decode() == str(next((tmp_path / "export" / "final").iterdir()))
        assert len(better) == 1 and (exported[2] is not None) == (better[0][1] < better[0][0])
        nothing = tf_estimator.train_and_evaluate(
            estimator, tf_estimator.TrainSpec(input_fn, max_steps=8), tf_estimator.EvalSpec(input_fn)
        )
        assert nothing == (None, [])


class TestMisuse:
    def test_of_steps_and_input(self, tmp_path):
        estimator = make(tmp_path, 2)
        with pytest.raises(errors.ConfigError, match="steps=1 and max_steps=1 exclude each other"):
            estimator.train(input_fn, steps=1, max_steps=1)
        with pytest.raises(errors.ConfigError, match="steps=0; it must be above 0"):
            estimator.train(input_fn, steps=0)
        with pytest.raises(errors.DataError, match="a step takes 2 batches, one a tower"):
            estimator.train(lambda: input_fn(count=BATCH))
        with pytest.raises(errors.DataError, match="input_fn yielded no batch to evaluate"):
            estimator.evaluate(lambda: input_fn().take(0))
        with pytest.raises(errors.DataError, match="input_fn returned None"):
            estimator.train(lambda: None)
        elsewhere = input_fn()
        with pytest.raises(errors.DataError, match="made outside of it"):
            estimator.train(lambda: elsewhere)
        with pytest.raises(errors.DataError, match="elements of 3 parts"):
            estimator.train(lambda: tf.data.Dataset.from_tensors((X, Y, Y)))
        with pytest.raises(errors.DataError, match="each tower would get the same"):
            estimator.train(lambda: ({"x": tf.constant(X)}, tf.constant(Y)))
        with pytest.raises(errors.ConfigError, match="must be a tf.compat.v1.train.SessionRunHook"):
            estimator.train(input_fn, hooks=[print])

    def test_of_a_model_fn(self, tmp_path):
        def train_with(change):
            def changed(features, labels, mode, params):
                spec = model_fn(features, labels, mode, params)
                return change(spec)

            make(tmp_path, 2, changed).train(input_fn)

        with pytest.raises(errors.GraphError, match="'train' has no loss. model_fn must give loss and train_op"):
            train_with(lambda spec: tf_estimator.EstimatorSpec(spec.mode, train_op=spec.train_op))
        with pytest.raises(errors.GraphError, match="loss has shape \\(4,\\)"):
            train_with(lambda spec: tf_estimator.EstimatorSpec(spec.mode, loss=tf.zeros([4]), train_op=spec.train_op))
        with pytest.raises(errors.GraphError, match="model_fn returned a NoneType"):
            train_with(lambda spec: None)
        with pytest.raises(errors.GraphError, match=r"must be a pair \(value, update_op\)"):
            tf_estimator.EstimatorSpec(EVAL, loss=tf.constant(0.0), eval_metric_ops={"a": 3})

        def own_update(features, labels, mode):
            w = v1.get_variable("w", [3], tf.float64)
            loss = tf.reduce_mean(tf.square(tf.linalg.matvec(features["x"], w) - labels))
            update = w.assign_sub(0.1 * tf.gradients(loss, [w])[0])
            return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=update.op)

        with pytest.raises(errors.GraphError, match=r"called apply_gradients .* \[0\] times"):
            make(tmp_path, 2, own_update).train(input_fn)
        with pytest.raises(errors.GraphError, match="takes no labels"):
            make(tmp_path, 1, lambda features, mode: None).train(input_fn)

        def of_its_own_rate(features, labels, mode, params):
            with layers.learning(rate_factor=2.0):
                return model_fn(features, labels, mode, params)

        with pytest.raises(errors.GraphError, match="weights is created in a block of layers.learning"):
            make(tmp_path, 2, of_its_own_rate).train(input_fn)

        calls = []

        def another_each_time(features, labels, mode):
            calls.append(v1.get_variable(f"w{len(calls)}", []))

        with pytest.raises(errors.GraphError, match="tower_1 would create the variable 'w1'"):
            make(tmp_path, 2, lambda features, labels, mode, params: (
                another_each_time(features, labels, mode) or model_fn(features, labels, mode, params)
            )).train(input_fn)  # fmt: skip

    def test_of_a_changed_model_on_an_old_model_dir(self, tmp_path):
        make(tmp_path).train(input_fn, steps=1)

        def changed(features, labels, mode, params):
            v1.get_variable("further", [2], tf.float64)
            return model_fn(features, labels, mode, params)

        for act in (lambda e: e.train(input_fn), lambda e: e.evaluate(input_fn), lambda e: next(e.predict(input_fn))):
            with pytest.raises(
                errors.RunError, match=r"does not fit this model_fn: further: graph float64\[2\], check"
            ):
                act(make(tmp_path, fn=changed))

    def test_of_configurations_and_directories(self, tmp_path):
        with pytest.raises(errors.ConfigError, match="num_gpus=0: it must be a count of at least 1"):
            make(tmp_path, 0).train(input_fn)
        with pytest.raises(errors.ConfigError, match="num_gpus and gpus both say what trains"):
            tf_estimator.RunConfig(num_gpus=2, gpus=[0, 1])
        with pytest.raises(errors.ConfigError, match="both say when to save"):
            tf_estimator.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
        with pytest.raises(errors.ConfigError, match="differ. Give one of them"):
            tf_estimator.Estimator(model_fn, tmp_path, tf_estimator.RunConfig(model_dir="elsewhere"))
        with pytest.raises(errors.RunError, match="holds no checkpoint. Train first"):
            make(tmp_path).get_variable_names()
        with pytest.raises(errors.ConfigError, match="predict_keys=.* predictions are y, twice"):
            next(make(tmp_path).predict(input_fn, predict_keys=["z"]))
        strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
        assert tf_estimator.RunConfig(train_distribute=strategy).towers == 1

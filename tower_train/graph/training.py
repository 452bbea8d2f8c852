"""The training graph: the parts of one step, in their order."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.graph import (
    context,
    gradients,
    loss_scale,
    progress,
    random_state,
    statistics,
    stream,
    summaries,
    towers,
    transfer,
    update,
)
from tower_train.graph.all_reduce import AllReduce
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.draws import TowerDraws, check_same
from tower_train.graph.gradients import average_gradients
from tower_train.graph.record import RandomNumbers, StepReport, TrainingGraph, Wish
from tower_train.graph.schedule import Schedule, group_rate, scaling
from tower_train.graph.towers import tower_loss
from tower_train.graph.variables import Variables
from tower_train.options import rules
from tower_train.workload import Examples, Tensors, Workload, softmax_cross_entropy

v1 = tf.compat.v1


def training_graph(workload: Workload, examples: Examples, config: Config, devices: Devices) -> TrainingGraph:
    """Builds N towers, the mean of their gradients, and one update of the variables.

    Raises:
      GraphError: the workload's network breaks a rule of the towers.
      ConfigError: an option that is useless for this network.
    """
    workload = _with_smooth_labels(workload.for_examples(examples), config.label_smoothing)
    dtype = tf.as_dtype(config.dtype)
    with tf.Graph().as_default() as graph, tf.device(HOST):
        v1.set_random_seed(config.seed & 0x7FFFFFFF)
        counters = update.Counters(config.global_batch)
        batches = _batches(config, devices)
        in_turn = batches[devices.worker]
        variables, scale = _variables(config, devices, batches), loss_scale.of_dtype(dtype)

        # 1. The stream: a batch for every tower, from the position that the run has come to.
        places = [device for device in devices.towers for _ in range(in_turn)]
        towers_of_each = tuple(len(devices.towers) * each for each in batches)
        split = stream.Split(config.tower_batch, len(places), devices.num_workers, devices.worker, towers_of_each)
        end = config.last_step(examples.num_examples) * config.global_batch
        way = transfer.choose(config.distort_on, workload, examples, places, end)
        source = stream.training_stream(workload, examples, config.seed, counters.examples_seen, split, way)

        # 2. The learning rate, a function of the examples seen.
        schedule = learning_schedule(config, examples.num_examples)
        learning_rate = schedule.rate(counters.examples_seen)

        # 3. On each device the same network on the same variables, its loss, its gradients.
        step = _step_context(config, devices, split, counters.epochs_seen(examples.num_examples))
        tower_losses, tower_grads, built = [], [], []
        for i, (device, batch, first) in enumerate(zip(places, source.batches, source.firsts, strict=True)):
            if i % in_turn:  # on the same device, one after the other
                batch, first = _after(tower_grads[-1], (batch, first))
            draws = TowerDraws(f"{config.seed} layer", first, config.tower_batch, counters.examples_seen)
            with towers.scope(i, device, variables, towers.seeded(config.seed)), step.of_tower(i, draws) as tower:
                outputs, loss = tower_loss(workload, *batch, dtype, training=True)
                towers.check_classes(workload, examples, outputs, workload.loss)
                draws.close()
                tower_grads.append(scale.gradients(functools.partial(variables.gradients, i), loss))
            tower_losses.append(loss)
            built.append(tower)

        # 4. The mean over all towers of all workers.
        mean_grads = variables.average(average_gradients, tower_grads)
        wishes = _wishes(devices.num_workers, bool(source.state), loss.dtype)
        mean_losses, wished, moving = _other_means(variables, tower_losses, wishes, built)
        _check_synchronized(workload, config.sync_batch_norm, moving[0])

        # 5. The weight decay, once a variable, and the limits of gradients.
        decayed = variables.each(gradients.add_weight_decay, mean_grads, variables.weight_decays())
        loss = mean_losses[0] + decayed[0][0]
        applied = variables.each(lambda one: update.limited(one[1], config.clip_gradients, config.optimizer), decayed)

        # 6. The check that everything is finite, and 7. the update if it is.
        apply = _update(config, variables, step, counters, learning_rate)
        skips = config.on_nonfinite == "skip"  # and counts, as each step has its own examples
        with variables.updated():
            finite = gradients.update_if_finite(
                tower_grads, tower_losses, applied[0], source.renewed(loss),
                lambda: apply(applied, moving, scale.after_update()),
                lambda: scale.without_update(loss, counters.count, skips),
            )  # fmt: skip

        # 8. The report of the step, and what else running wants to know of it.
        counting, so_far = [], {}
        if config.stall_timeout_secs:
            counting, so_far = progress.count_progress(source.arrivals, tower_losses, tower_grads)
        with tf.control_dependencies([finite, *counting]):
            done, seen = counters.global_step.read_value(), counters.examples_seen.read_value()
            stopping, saving = wished.get("stopping", tf.zeros([], loss.dtype)), wished.get("saving", ())
            report = StepReport(done, seen, loss, mean_losses[0], learning_rate, stopping, finite,
                                scale.report(loss, finite), saving)  # fmt: skip
        return TrainingGraph(
            graph=graph, train_op=finite.op, report=report, progress=so_far,
            summary=_summary(config, applied[0], source, finite.op), global_step=counters.global_step,
            wishes=wishes, num_towers=len(places), towers_of_each=towers_of_each,
            random_numbers=_random_numbers(workload, source, tower_losses[0], built, config.allow_stateful_random),
            **_about(config, examples, source, applied[0]), **_saved(config, variables, devices),
            notes=tuple(filter(None, (way.note, source.note))),
        )  # fmt: skip


def _summary(
    config: Config, applied: gradients.GradientsAndVariables, source: stream.Stream, update_op: tf.Operation
) -> tf.Tensor | None:  # fmt: skip
    if not config.summary_every_steps:
        return None
    return summaries.step_summary(applied, "tower_0", source.batches[0][0], update_op)


def _about(
    config: Config, examples: Examples, source: stream.Stream, applied: gradients.GradientsAndVariables
) -> dict[str, Any]:
    """Returns the attributes of TrainingGraph about its examples and gradients."""
    return {
        "data": examples.name,
        "data_order": source.order,
        "num_examples": examples.num_examples,
        "global_batch": config.global_batch,
        "checked": ("the loss", *(f"the gradient of {variable.op.name}" for _, variable in applied)),
        "stream_initializer": source.initializer,
        "stream_state": source.state,
    }


def _saved(config: Config, variables: Variables, devices: Devices) -> dict[str, Any]:
    """Returns the attributes of TrainingGraph about the contents of a checkpoint, and its copies."""
    saved, num_workers = v1.global_variables(), devices.num_workers
    return {
        "num_workers": num_workers,
        "num_parameters": sum(math.prod(variable.shape) for variable in v1.trainable_variables()),
        "variables": saved,
        "variables_finite": {v.op.name: gradients.is_finite(v) for v in saved if v.dtype.is_floating},
        "fingerprints": variables.fingerprints() if config.check_mirrors_every_steps else None,
        "copied": tuple(original.op.name for original, *_ in variables.copied()),
        "broadcast": variables.broadcast(_numbers(saved), devices.worker) if num_workers > 1 else None,
    }


def _numbers(variables: list[tf.Variable]) -> list[tf.Variable]:
    """Returns the variables that workers have in common: all but texts, which are the positions of their iterators."""
    return [variable for variable in variables if variable.dtype.base_dtype != tf.string]


def learning_schedule(config: Config, num_examples: int) -> Schedule:
    """Returns the learning rate by the options, for so many examples per epoch."""
    return Schedule(
        kind=config.lr_schedule,
        initial=config.learning_rate,
        factor=config.learning_rate_decay_factor,
        epochs_per_decay=config.num_epochs_per_decay,
        boundaries=config.lr_boundaries,
        points=rules.parse_points(config.lr_points) if config.lr_points else None,
        scale=scaling(config.lr_scaling, config.global_batch, config.lr_base_batch),
        warmup_epochs=config.warmup_epochs,
        num_examples=num_examples,
        total_examples=config.last_step(num_examples) * config.global_batch,
    )


def _with_smooth_labels(workload: Workload, label_smoothing: float) -> Workload:
    if not label_smoothing:
        return workload
    if workload.loss is not softmax_cross_entropy:
        raise errors.ConfigError(
            f"--label_smoothing={label_smoothing:g}: workload {workload.name} has a loss of its own: smooth there."
        )
    return dataclasses.replace(workload, loss=functools.partial(softmax_cross_entropy, label_smoothing=label_smoothing))


def _batches(config: Config, devices: Devices) -> tuple[int, ...]:
    """Returns, over workers, the batches that each of a worker's devices takes in a step, one after the other.

    With --elastic those of the most workers are shared out among those that are there, whole: so each batch is
    normalised as it always is, and takes as much memory.
    """
    return stream.shared_out(config.accumulate_steps * (config.most_workers or devices.num_workers),
                             devices.num_workers)  # fmt: skip


def _variables(config: Config, devices: Devices, batches: Sequence[int]) -> Variables:
    """Chooses the place of the variables and the all-reduce between their copies. batches: from `_batches`."""
    mirrored = config.variable_update == "mirrored"
    places, towers_each = (devices.towers, batches[devices.worker]) if mirrored else ((HOST,), None)
    if len(places) * devices.num_workers == 1:
        for name, is_given in (("check_mirrors_every_steps", config.check_mirrors_every_steps),
                               ("all_reduce_dtype", config.all_reduce_dtype != "same")):  # fmt: skip
            if is_given:
                raise errors.ConfigError(
                    f"--{name}={getattr(config, name)}: there is one copy of the variables. It is for several workers, "
                    "or for --variable_update=mirrored with several towers."
                )
    dtype = tf.bfloat16 if config.all_reduce_dtype == "bfloat16" else None
    weight = None if len(set(batches)) == 1 else batches[devices.worker] * len(batches) / sum(batches)
    all_reduce = AllReduce(places, config.all_reduce or "collective", dtype, devices.num_workers, weight=weight)
    return Variables(places, towers_each, all_reduce)


def _step_context(config: Config, devices: Devices, split: stream.Split, epochs_seen: tf.Tensor) -> context.Context:
    return context.Context(
        tower=split.first_tower,
        synchronized_towers=len(devices.towers) * split.num_workers if config.sync_batch_norm else 0,
        epochs_seen=epochs_seen,
    )


def _after(tower_grads: gradients.GradientsAndVariables, batch: Tensors) -> Tensors:
    """Delays a batch until the previous tower on its device is done, so that activations of only one are in memory."""

    def there(tensor):
        with tf.device(tensor.device):
            return tf.identity(tensor)

    with tf.control_dependencies([grad.op for grad, _ in tower_grads if grad is not None]):
        return tf.nest.map_structure(there, batch)


def _wishes(num_workers: int, saves_together: bool, dtype: tf.DType) -> dict[str, Wish]:
    """Returns the wishes that this worker may have, by name; none without other workers."""
    if num_workers == 1:
        return {}
    wishes = {}
    for name in ("stopping", "saving") if saves_together else ("stopping",):
        wish = v1.get_variable(name, [], dtype, v1.zeros_initializer(), trainable=False,
                               collections=[v1.GraphKeys.LOCAL_VARIABLES])  # fmt: skip
        wishes[name] = Wish(wish.read_value(), wish.assign(1, read_value=False), wish.initializer)
    return wishes


def _other_means(
    variables: Variables, losses: list[tf.Tensor], wishes: dict[str, Wish], built: list[context.Context]
) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], list[list[context.Statistic]]]:
    """Returns the means over all towers of small values that travel together.

    Args:
      losses: over towers.
      wishes: from `_wishes`.
      built: over towers, their contexts.

    Returns:
      The mean loss, over copies; the mean wishes, scalars by name; the mean statistics, over copies.
    """
    noted = [tower.statistics for tower in built]
    statistics.check_same(noted, variables.original)
    own_wishes = [wish.value for wish in wishes.values()]
    values = [[loss, *own_wishes, *statistics.values(own)] for loss, own in zip(losses, noted, strict=True)]
    means = variables.average_values(values)
    moving = [
        statistics.with_means(own[0], mean[1 + len(wishes) :])
        for own, mean in zip(variables.by_copy(noted), means, strict=True)
    ]
    return [mean[0] for mean in means], dict(zip(wishes, means[0][1:], strict=False)), moving


def _random_numbers(
    workload: Workload, source: stream.Stream, first_loss: tf.Tensor, built: list[context.Context],
    allow_stateful: bool,
) -> RandomNumbers:  # fmt: skip
    """Names the random numbers in the towers; random_state.check and draws.check_same refuse some."""
    last = [first_loss.op, *(statistic.value.op for statistic in built[0].statistics)]
    if not source.state:  # examples in an order of their own draw as they like: their iterator's state is saved
        last.append(source.initializer)
    stateful = random_state.check(workload.name, last, allow_stateful)
    by_example = check_same([tower.draws for tower in built])
    return RandomNumbers(by_example, tuple(sorted(built[0].drawn_by_tower)), tuple(stateful))


def _check_synchronized(workload: Workload, sync_batch_norm: bool, moving: list[context.Statistic]) -> None:
    if sync_batch_norm and not any(statistic.followed for statistic in moving):
        raise errors.ConfigError(
            f"--sync_batch_norm: workload {workload.name} has no tower_train.layers.batch_normalization "
            "that is trained. Leave the option out."
        )


def _update(
    config: Config, variables: Variables, step: context.Context, counters: update.Counters,
    learning_rate: tf.Tensor,
) -> Callable[[list, list, list], tf.Operation]:  # fmt: skip
    """Returns a function that builds the update of all copies from their gradients and statistics, and then of the
    counters, to which it adds further (counter, amount)."""
    dtype = towers.variable_dtype(tf.as_dtype(config.dtype))
    averages = update.moving_averages(config.moving_average_decay, counters.global_step)

    def learning(variable):
        return step.learning.get(variables.original(variable).op.name, context.Learning())

    def optimizer(learning):
        rate = tf.cast(group_rate(learning_rate, step.epochs_seen, learning), dtype)
        iterations = config.muon_iterations if learning.muon else 0
        momentum = config.momentum if learning.momentum is None else learning.momentum
        return update.make_optimizer(config.optimizer, rate, momentum, config.nesterov, iterations)

    def update_copy(grads, weights, moving):
        groups = [(optimizer(rate), members) for rate, members in update.by_learning(grads, learning).items()]
        return update.apply_update(groups, weights, moving, averages)

    def apply(applied, moving, others):
        with tf.control_dependencies(variables.each(update_copy, applied, variables.trained(), moving)):
            return counters.count(others)

    return apply

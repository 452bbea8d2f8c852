"""Opens a training from its plan: the graph, a session with the restored variables, the actions after each step."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.console import ProgressBar, enumeration, say
from tower_train.graph import elements, step_failures, summaries
from tower_train.graph.record import TrainingGraph
from tower_train.graph.training import build_step, opened
from tower_train.proof.towers import compare_towers, is_due
from tower_train.run import actions, data_check, messages, saving
from tower_train.run.evaluations import Evaluations
from tower_train.run.plan import Plan
from tower_train.run.signals import Received
from tower_train.run.training import Action, Training, UserFunctions
from tower_train.run.watchdog import StepWatchdog
from tower_train.run_dir import checkpoint, directory, logs

v1 = tf.compat.v1
_MOST_NAMES = 10  # of variables, in a line
_COMPARED = "compared_with_one_tower"  # key of run.json


@contextlib.contextmanager
def open_training(plan: Plan, membership: Membership, received: Received, user: UserFunctions) -> Iterator[Training]:
    """Opens a training, ready for its steps; it is closed at the end of the block.

    Raises GraphError if its network breaks a rule of the towers, RunError if the checkpoint does not fit it.
    """
    graph = build_step(plan.step)
    training = Training(plan, graph, membership, received, user)
    layout, accumulate_steps = graph.layout, plan.config.accumulate_steps
    with contextlib.ExitStack() as stack:
        _prepare(training, stack)
        # only a step that waits for an all-reduce has to be ended from outside
        note_stall = membership.note_stall if layout.num_replicas > 1 else lambda what, seconds: None
        training.watchdog = StepWatchdog(plan.config.stall_timeout_secs, graph.progress, note_stall)
        stack.enter_context(training.watchdog)
        stack.enter_context(membership.failures_named())
        stack.enter_context(
            step_failures.explained(
                graph.examples,
                plan.workload.name,
                tower_batch=layout.tower_batch,
                accumulate_steps=accumulate_steps,
                batch=training.describe_batch,
                graph=graph.graph,
            )
        )
        training.session = training.watchdog.session = stack.enter_context(_open_session(training))
        received.free = training.session.close
        training.actions = _actions(training, stack)
        yield training


def _prepare(training: Training, stack: contextlib.ExitStack) -> None:
    """Compares the checkpoint with the graph, the towers with one tower; writes run.json and the first lines."""
    plan, graph = training.plan, training.graph
    plan.run_json["num_parameters"] = graph.saved.num_parameters
    notes = [*plan.notes, *graph.notes]
    if stateful := graph.stateful:
        notes.append(
            "*** --allow_stateful_random: several towers and resumed runs train otherwise than one, because of "
            f"{', '.join(stateful)}."
        )
    if plan.is_chief:
        notes += _prepare_chief(training, stack)
    path = plan.run_json["config"]["workload"]
    if plan.is_to_be_compared and is_due(plan.config, path, stateful):
        outcome = compare_towers(plan.workload, plan.examples, plan.config, graph)
        notes.append(outcome.line)
        plan.run_json[_COMPARED] = outcome._asdict()
    if plan.is_chief:
        checkpoint.remove_leftovers(plan.run_dir.path)  # only now, as a start that fails before changes nothing
        # drops the records of what will be done again
        plan.run_dir.cut_metrics(plan.steps_done, bool(training.evaluations.pending))
        plan.run_dir.write(directory.RUN, plan.run_json)
        lines = messages.opening_lines(plan)
    else:
        lines = [messages.joining_line(plan, training.membership.task)]
    say(*lines, *notes)


def _prepare_chief(training: Training, stack: contextlib.ExitStack) -> list[str]:
    """Makes what only the chief has, and plans what it restores; returns lines for the log."""
    plan, graph, config, newest = training.plan, training.graph, training.plan.config, training.plan.checkpoint
    notes = []
    with graph.graph.as_default():
        training.checkpoints = checkpoint.Checkpoints(plan.run_dir.path, graph.saved.variables, config.keep_checkpoints)
        if newest:
            if not config.override:  # which begins the data anew
                _check_positions(graph, newest)
            training.restore, fresh = training.checkpoints.plan_restore(newest, config.override)
            if fresh:
                notes.append(f"Not in {newest}, initialised afresh: {enumeration(fresh, _MOST_NAMES)}.")
    if config.check_data and not newest:  # a resumed run has shown its data
        warnings, training.example_images = data_check.look(plan.workload, plan.examples, config.seed)
        notes += warnings
    training.evaluations = Evaluations(plan)
    stack.callback(training.evaluations.close)
    notes += training.evaluations.begin(graph.saved.variables)
    if _COMPARED in plan.before:  # stays true, unless this start compares again
        plan.run_json[_COMPARED] = plan.before[_COMPARED]
    return notes


def _check_positions(graph: TrainingGraph, path: str) -> None:
    """Raises RunError if the positions in a checkpoint are of another number of workers."""
    names = checkpoint.reader(path).get_variable_to_shape_map()
    saved_by = set(filter(None, map(elements.saved_by, names))) if graph.stream.state else set()
    if saved_by and graph.layout.num_workers not in saved_by:
        raise errors.RunError(
            f"{path}: workers were {max(saved_by)}, now {graph.layout.num_workers}, and it holds their old positions "
            f"in {graph.examples.name}. Go on with as many, or give --override, which begins the data anew, without "
            "the rest of the current epoch."
        )


@contextlib.contextmanager
def _open_session(training: Training) -> Iterator[v1.Session]:
    """Opens a session in which the variables have the chief's values and the stream is at this worker's position; a
    lost worker closes it, which frees a step. The graph is final from now on.

    Raises:
      DataError: the stream is too short for the steps, or its state cannot be saved.
      RunError: it cannot be moved to its position.
    """
    graph, membership, is_chief = training.graph, training.membership, training.plan.is_chief
    state = graph.stream.state

    def set_variables(session: v1.Session) -> None:
        graph.graph.finalize()
        membership.session_opened(session)
        if training.restore:
            training.restore(session)
        elif is_chief:
            session.run([variable.initializer for variable in graph.saved.variables])
        if graph.saved.broadcast is not None:
            if state and is_chief:
                membership.store.hand_out(session.run(state.variables))
            session.run(graph.saved.broadcast)  # the checkpoint may be on the chief's disk only
            if state and not is_chief:  # each worker goes on with its own data
                session.run([variable.initializer for variable in state.variables])
                saving.assign(session, [state.variables[state.worker]], [membership.store.fetch()])

    with opened(graph, set_variables, membership.target) as session:
        if state:  # else the stream has begun at `examples_seen`
            _begin_stream(session, graph, training.plan.last_step)
        yield session


def _begin_stream(session: v1.Session, graph: TrainingGraph, last_step: int) -> None:
    """Moves a graph's iterator to the checkpoint's position, and makes sure that its state can be saved."""
    # before the first step: a run that cannot be saved should not train for hours
    state, name = graph.stream.state, graph.examples.name
    length, needed = int(session.run(state.length)), last_step * graph.layout.global_batch
    if 0 <= length < needed:
        raise errors.DataError(
            f"{name}: its dataset ends after {length} examples, and this run takes {needed}. Make it endless with "
            ".repeat()."
        )
    for op, kind, problem, advice in (
        (
            state.resume,
            errors.RunError,
            "cannot be put where the checkpoint says",
            "Make it by the same steps as when the run began, or give another --train_dir.",
        ),
        (
            state.write,
            errors.DataError,
            "cannot be saved in a checkpoint",
            "No such run is resumed: tf.data saves neither Python generators and functions nor stateful operations. "
            "Use tf.random.stateless_* and the like, or data that is fetched by index.",
        ),
    ):
        try:
            session.run(op)
        except tf.errors.OpError as error:
            raise kind(f"{name}: its dataset {problem} ({errors.reason(error)}). {advice}") from None


def _actions(training: Training, stack: contextlib.ExitStack) -> list[Action]:
    """Makes the actions that may be due after a step, in their order; what they open is closed with the stack."""
    due: list[Action] = [actions.Guard(training)]  # first: a step that ends the run is neither logged nor saved
    if training.plan.config.check_mirrors_every_steps:
        due.append(actions.MirrorCheck(training))  # before copies that differ are saved
    if training.graph.choice:
        due.append(actions.ChooseExamples(training))  # before the choice is saved
    if training.plan.is_chief:
        due += _chiefs_actions(training, stack)
    elif training.graph.stream.state:
        due.append(saving.SendPosition(training))
    return [*due, training.user]  # these may look at what was saved


def _chiefs_actions(training: Training, stack: contextlib.ExitStack) -> list[Action]:
    """Makes the actions that write files."""
    plan = training.plan
    bar = stack.enter_context(ProgressBar(plan.steps_done, plan.last_step))
    metrics = logs.MetricsFile(plan.run_dir.path / directory.METRICS)
    writer = stack.enter_context(contextlib.closing(logs.EventWriter(plan.run_dir.path)))
    # makes TensorBoard drop what an interrupted start logged from this step on
    writer.add(plan.steps_done + 1, session_log=v1.SessionLog(status=v1.SessionLog.START))
    if not plan.steps_done:
        writer.add(0, graph_def=summaries.serialized_graph(training.graph.graph))
    if training.example_images:
        logs.add_image(writer, "examples", training.example_images)
        plan.run_dir.write_image(directory.EXAMPLE_IMAGES, training.example_images)
    return [
        actions.Log(training, bar, metrics, writer),
        stack.enter_context(contextlib.closing(actions.Profile(training))),
        saving.Saver(training, metrics, writer),
    ]

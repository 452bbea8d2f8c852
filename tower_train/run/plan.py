"""The plan of one start of a run: everything that is decided before anything is built."""

import dataclasses

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.config import Config
from tower_train.examples import DataRequest, Examples
from tower_train.graph import devices, schedule
from tower_train.graph.step_plan import StepPlan, plan_step
from tower_train.options import as_text
from tower_train.run import choices
from tower_train.run_dir import checkpoint, directory, manifest
from tower_train.run_dir.best import Best
from tower_train.workload import Workload


@dataclasses.dataclass(frozen=True)
class Plan:
    """One start of a run in one worker. All workers have agreed on the group, on its training, first and last step."""

    workload: Workload
    config: Config  # settled by the step's plan; only --check_towers=auto waits for the graph
    examples: Examples
    devices: devices.Devices  # of this worker, with its place in the group
    step: StepPlan
    run_dir: directory.RunDirectory
    before: dict  # run.json of the last start; empty for a new run
    run_json: dict  # of this start; open_training adds what the graph and the comparison of its towers tell
    is_chief: bool
    checkpoint: str | None  # the chief's path to begin at; None for a new run, and in other workers
    steps_done: int  # by earlier starts
    end: int  # last step of this start, below `last_step` if the run is over before it
    last_step: int  # of the run
    notes: tuple[str, ...]  # for the log

    @property
    def is_to_be_compared(self) -> bool:
        """Returns whether its towers must show that they equal one: in a new run, and in a resumed one with another
        number of batches a step, --variable_update or --batch_norm."""
        if not self.steps_done:
            return True
        if self.config.elastic or not self.before:  # its workers come and go; or a checkpoint without a run.json
            return False
        options = self.before["config"]
        workers = len((options["worker_hosts"] or "").split(","))
        batches = len(self.before["devices"]) * options["accumulate_steps"] * workers
        return batches != self.config.batches_per_step or any(
            options[name] != getattr(self.config, name) for name in ("variable_update", "batch_norm")
        )


def make_plan(
    path: str | None, workload: Workload, config: Config, run_dir: directory.RunDirectory, membership: Membership
) -> Plan:
    """Loads the examples, makes the choices that are left to the machine, finds the checkpoint to begin at, and agrees
    on all that with the other workers.

    Args:
      path: the workload's import path; None if it has none.
      workload, config, run_dir: of the run.
      membership: of this worker, whose devices then know its place in the group.

    Raises:
      UserError: an option, the data or the directory does not fit the run, or workers differ.
      RunOver: the run has ended without this worker.
    """
    before, is_chief = run_dir.read(directory.RUN), membership.task.is_chief
    manifest.check_workload(run_dir.path, before, workload, config.override)  # before its examples are downloaded
    # a resumed run stays with the data that `auto` chose first
    dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
    workload.check_dataset(dataset)
    # before options are settled, as epochs depend on their number
    examples = workload.split(DataRequest("train", dataset, config.data_dir, config.seed, config.validation_fraction))
    _check_elastic(examples, config)
    config, notes = choices.resolve(config, before.get("config", {}), membership.devices)
    options = dataclasses.asdict(config) | {"workload": path}
    run_json = manifest.describe(workload, examples, options, config.global_batch, membership.devices.names)
    last_step = config.last_step(examples.num_examples)
    newest, steps_done, end = None, 0, last_step  # other workers get the last two by `agree`, and no checkpoint
    if is_chief:
        notes += manifest.check_resume(run_dir.path, before, run_json, config.override, workload.options)
        newest, damage = _newest_checkpoint(run_dir, is_known=bool(before), override=config.override)
        steps_done, notes = checkpoint.saved_step(newest) if newest else 0, notes + damage
        _check_profile(config, last_step)
        if before:  # the schedule may stretch to another last step
            ends = {name: before["config"].get(name) for name in ("max_steps", "epochs")}
            was = dataclasses.replace(config, **ends)
            notes += schedule.note_on_resuming(config, was, examples.num_examples, steps_done)
        # known before the graph is built, as a start that early stopping has ended does no step
        if Best(run_dir, config, examples.num_examples, steps_done).is_over:
            end = steps_done
    # before the graph, whose layout depends on the group, so that it is built only once
    steps_done, end = membership.agree(lambda: manifest.same_everywhere(run_json, workload), steps_done, end)
    step = plan_step(workload, examples, config, membership.devices)
    return Plan(
        workload,
        step.config,
        examples,
        membership.devices,
        step,
        run_dir,
        before,
        run_json,
        is_chief,
        newest,
        steps_done,
        end,
        last_step,
        (*notes, *membership.devices.notes),
    )


def plan_trial(workload: Workload, config: Config, examples: Examples | None = None) -> tuple[StepPlan, list[str]]:
    """Plans the step of a training without a directory, such as a range test; also returns lines for the log. examples:
    to train on; None for the workload's."""
    devices.choose_kernels(config.deterministic, config.tensor_float_32)
    placed = devices.place(config)
    if examples is None:
        request = DataRequest("train", config.dataset, config.data_dir, config.seed, config.validation_fraction)
        examples = workload.split(request)
    config, notes = choices.resolve(config, {}, placed)
    return plan_step(workload, examples, config, placed), [*notes, *placed.notes]


def _newest_checkpoint(run_dir: directory.RunDirectory, is_known: bool, override: bool) -> tuple[str | None, list[str]]:
    """Returns the newest intact checkpoint of a locked directory, None without one, and lines about damaged ones.

    Raises RunError if none is intact, or it is not of this run. is_known: there is a run.json; with --override there
    need not be.
    """
    newest = checkpoint.latest(run_dir.path)
    there = newest or next(run_dir.path.glob(directory.METRICS), None)
    if there and not is_known and not override:
        raise errors.RunError(
            f"--train_dir={run_dir.path} holds {there} but no {directory.RUN}: it is no run of this program. Give "
            f"another directory, or --override to {'start from that checkpoint' if newest else 'replace that file'}."
        )
    return checkpoint.newest_intact(run_dir.path) if newest else (None, [])


def _check_elastic(examples: Examples, config: Config) -> None:
    """Raises ConfigError for --elastic with examples that it cannot serve."""
    if config.elastic and examples.elements:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: {examples.name} comes in an order of its own, in which each worker has a "
            "place that no other number of workers can go on from. Leave the option out, or fetch the data by index."
        )


def _check_profile(config: Config, last_step: int) -> None:
    """Raises ConfigError for --profile_steps that the run does not reach."""
    if config.profile_steps and config.profile_steps[0] > last_step:
        raise errors.ConfigError(
            f"--profile_steps={as_text(config.profile_steps)}: the run ends at step {last_step}. Choose earlier "
            "steps, or train longer."
        )

"""The agreement of a cluster's workers: which start of each one trains, and that all train the same."""

import dataclasses
import json
from collections.abc import Callable, Mapping

from tower_train import errors
from tower_train.cluster.heartbeat import Heartbeat
from tower_train.cluster.rendezvous import RESIZED
from tower_train.cluster.store import WorkerState, WorkerStatus
from tower_train.cluster.task import Task
from tower_train.console import say

_MOST_SHOWN = 5  # differences between workers
_COMPARISON = "number of the comparison"
_trained_with: set[tuple[Task, str]] = set()  # starts of chiefs in this process, whose end is no news to it


@dataclasses.dataclass(eq=False)
class RunOver(Exception):
    """A run that has ended while this worker waited for a place in it."""

    stopped_by: str
    step: int  # its last


class Agreement:
    """One worker's part in the agreement, through the statuses in the chief's key-value store."""

    def __init__(self, task: Task, heartbeat: Heartbeat):
        self._task, self._heartbeat = task, heartbeat
        self._named_chief, self._comparisons = "", 0

    def reach(self, facts: Callable[[], Mapping], steps_done: int, last_step: int) -> tuple[int, int]:
        """Waits until all workers are ready; see Membership.agree."""
        facts = _as_read({"the list of workers": self._task.hosts, **facts()})
        if self._task.is_chief:
            self._heartbeat.tell(facts=facts, steps=(steps_done, last_step), step=steps_done)
            self._heartbeat.tell(state=WorkerState.TRAINING, members=self._await_others())
        else:
            chief = self._await_chief(facts)
            steps_done, last_step = chief.steps
            _trained_with.add((self._task, chief.start_id))
            self._heartbeat.tell(state=WorkerState.TRAINING, step=steps_done, members=chief.members)
        return steps_done, last_step

    def compare(self, facts: Mapping) -> None:
        """Makes sure that workers which have agreed mean the same; all must call it. facts: what must be the same, by
        name. ConfigError if this worker differs from the chief, which ends all; WorkerError if one is missing."""
        self._comparisons += 1
        facts = _as_read(facts) | {_COMPARISON: self._comparisons}
        self._heartbeat.tell(facts=facts)
        if self._task.is_chief:
            return
        while (self._chief.facts or {}).get(_COMPARISON) != self._comparisons:
            self._heartbeat.tell()  # to look now
            self._heartbeat.pause()
        try:
            self._compare(facts, self._chief.facts)
        except errors.ConfigError as error:
            self._heartbeat.fail(error)
            raise

    @property
    def _chief(self) -> WorkerStatus:
        return self._heartbeat.detector.statuses[0]

    def _await_others(self) -> tuple[str, ...]:
        """Waits, in the chief, until the rendezvous has chosen a group; returns its start_ids over all workers."""
        detector, status = self._heartbeat.detector, self._heartbeat.status
        while (group := self._heartbeat.rendezvous.choose(detector.ready(status))) is None:
            self._heartbeat.pause()
        start_ids = [status.start_id, *(other.start_id for other in detector.statuses[1:])]
        return tuple(start_id if i in group else "" for i, start_id in enumerate(start_ids))

    def _await_chief(self, facts: dict) -> WorkerStatus:
        """Waits for a start of the chief that trains with this start of this worker; returns its status."""
        compared = None
        while self._heartbeat.status.start_id not in (chief := self._chief).members:
            self._wait_for_place(chief)
            is_of_now = chief.facts is not None and chief.state is not WorkerState.OVER
            if is_of_now and chief.start_id != compared:
                compared = chief.start_id
                self._heartbeat.note(state=WorkerState.STARTING, chief=compared)
                self._compare(facts, chief.facts)
                self._heartbeat.tell(state=WorkerState.READY)
            if self._heartbeat.is_displaced:
                raise errors.ConfigError(
                    f"{self._task.name(self._task.index)} trains already, in another process. Stop that first, or give "
                    "this one another --task_index."
                )
            self._heartbeat.pause()
        return chief

    def _wait_for_place(self, chief: WorkerStatus) -> None:
        """Reports what the others do while this worker waits for a place. RunOver if they have ended; WorkerError if
        nobody knows why."""
        is_over = chief.state is WorkerState.OVER and chief.stopped_by != RESIZED
        if is_over and self._heartbeat.has_row and (self._task, chief.start_id) not in _trained_with:
            if chief.stopped_by is None:  # a worker that is lost, which had not said why; or a program
                raise errors.WorkerError(
                    f"The other workers have ended at step {chief.step}, without {self._task.name(self._task.index)}. "
                    "Start all again, with the same command."
                )
            self._heartbeat.end(WorkerState.GONE)
            say(f"*** The run has ended at step {chief.step} ({chief.stopped_by}), without this worker.")
            raise RunOver(chief.stopped_by, chief.step)
        is_elastic = self._heartbeat.rendezvous.is_elastic
        if is_elastic and chief.state is WorkerState.TRAINING and self._named_chief != chief.start_id:
            self._named_chief, most, step = chief.start_id, self._heartbeat.rendezvous.most, chief.step
            say(f"*** {len(chief.group)} of at most {most} train, at step {step}: waiting for a place among them.")

    def _compare(self, facts: dict, chiefs: dict) -> None:
        """Raises ConfigError if this worker would train something else than the chief."""
        names = [name for name in sorted({*chiefs, *facts}) if chiefs.get(name) != facts.get(name)]
        differing = [f"{name} is {facts.get(name)}, the chief's {chiefs.get(name)}" for name in names]
        if len(differing) > _MOST_SHOWN:
            differing[_MOST_SHOWN:] = [f"and {len(differing) - _MOST_SHOWN} more"]
        if differing:
            raise errors.ConfigError(
                f"{self._task.name(self._task.index)} cannot train with the chief: {'; '.join(differing)}. Start all "
                "workers with the same code, options and data."
            )


def _as_read(facts: Mapping) -> dict:
    """Returns values as they arrive through the key-value store: tuples become lists, keys become texts."""
    return json.loads(json.dumps(facts))

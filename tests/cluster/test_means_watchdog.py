"""The progress of a program's workers, by counts of their gradients and of the means of those."""

from tower_train.cluster.watchdog import MeansWatchdog
from tower_train.graph import progress


class Told:
    """Stands in for the membership: what it was told."""

    def note_means(self, count, waiting_secs):
        self.means = count, waiting_secs

    def note_stall(self, what, seconds):
        self.stall = what, seconds


def test_what_a_worker_waits_for_and_since_when():
    seconds, told = [0.0], Told()
    watch = MeansWatchdog(told, 10.0, clock=lambda: seconds[0])

    def look(arrived, averaged, after):
        seconds[0] += after
        told.stall = None
        watch.note(arrived, averaged)
        return told.means, told.stall

    assert look(0, 0, after=100) == ((0, 0.0), None)  # building its graph
    assert look(1, 0, after=1) == ((0, 0.0), None)
    assert look(1, 0, after=9) == ((0, 9.0), None)
    assert look(1, 0, after=5) == ((0, 14.0), (progress.FOR_AVERAGING, 4.0))
    assert look(1, 1, after=1) == ((1, 0.0), ("", 0.0))
    assert look(1, 1, after=12) == ((1, 0.0), (progress.FOR_PROGRAM, 2.0))
    assert look(2, 2, after=1) == ((2, 0.0), ("", 0.0))
    assert look(3, 2, after=1) == ((2, 0.0), None)

"""The soak kills, damages and compares; seconds of it find nothing."""

import re

import jobs


def test_a_run_that_is_killed_for_seconds_loses_and_repeats_nothing():
    done = jobs.command(str(jobs.TESTS / "soak.py"), "--minutes=0.03", "--seed=0")
    assert done.returncode == 0, done.stdout + done.stderr
    kills, lost, repeated, mismatches = map(
        int,
        re.search(r" (\d+) kills .* (\d+) examples lost, (\d+) repeated, (\d+) mismatches", done.stdout).groups(),
    )
    assert kills > 0 == lost == repeated == mismatches

"""The fuzz finds nothing in a few cases of each kind."""

import fuzz_cases
import jobs


def test_a_few_cases_of_each_kind_are_without_fault():
    done = jobs.command("fuzz", "--cases=2", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [f"fuzz: {kind}" for kind in fuzz_cases.KINDS]

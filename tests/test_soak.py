"""The soak disturbs and compares."""

import re

import soak


def test_a_few_trials_lose_and_repeat_nothing_and_end_in_one_line(capsys):
    assert soak.main(["--cases=alone", "--trials=2", "--seed=2"]) == 0
    line = r"alone: 3 trials .*damaged checkpoint 1, .*kill 1.*; lost, different or untrue: 0"
    assert re.search(line, capsys.readouterr().out)

"""The soak disturbs and compares."""

import re

import soak


def test_a_few_trials_lose_and_repeat_nothing_and_end_in_one_line(capsys):
    status = soak.main(["--cases=alone,starts", "--trials=2", "--seed=10"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert re.findall(r"(\w+): 2 trials.*; lost, different or untrue: 0", printed) == ["alone", "starts"]
    assert "(damaged checkpoint 1, kill 1)" in printed

"""Programs with a session of their own, several workers of them in processes of their own, against plain numpy."""

import re

import clusters
import horovod_program
import jobs
import numpy as np
import pytest
import session_program


def trained(initial_w, initial_e, steps):
    """Momentum of w and Adam of e in turns, on all examples at once, by hand."""
    features, rows = session_program.data()
    rate, beta1, beta2, epsilon = session_program.ADAM
    w, e = initial_w.copy(), initial_e.copy()
    velocity, first, second = np.zeros_like(w), np.zeros_like(e), np.zeros_like(e)
    for step in range(1, steps + 1):
        velocity = session_program.MOMENTUM * velocity + 2 / len(rows) * features.T @ (features @ w - e[rows])
        w = w - session_program.RATE * velocity
        grad = np.zeros_like(e)
        np.add.at(grad, rows, -2 / len(rows) * (features @ w - e[rows]))
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
        step_rate = rate * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        e = e - step_rate * first / (np.sqrt(second) + epsilon)
    return w, e, velocity


def assert_named(text, outputs):
    """Each says it in its one line of an error, and nothing else of it."""
    for output in outputs:
        [line] = [line for line in output.splitlines() if line.startswith("tower_train: error: ")]
        assert text in re.sub(r"localhost:\d+", "HOST", line)
        assert "Traceback" not in output


@pytest.mark.parametrize(("size", "fault", "status", "text"), [
    (2, "early", 2, "worker 1 (HOST) has ended after step 12, but step 13 waits for it"),
    (2, "asleep", 138, "worker 1 (HOST) waits for its program or its input: it has no gradients for this step"),
    (3, "killed", 138, "worker 2 (HOST) is missing: no sign of life"),
])  # fmt: skip
def test_workers_train_what_numpy_trains_on_all_examples_until_one_is_lost_and_named(
    size, fault, status, text, tmp_path
):  # fmt: skip
    """From the chief's values, and of three so that one learns who is lost from the chief."""
    with clusters.programs(size, "session_program", str(tmp_path), fault) as workers:
        statuses = [each.process.wait(jobs.WAIT_SECS) for each in workers]
        outputs = [each.output() for each in workers]
    assert statuses == [status] * (size - 1) + [-9 if fault == "killed" else status], outputs
    assert_named(text, outputs[: size - 1])
    if fault == "killed":
        assert_named("Start the program again on every machine", outputs[: size - 1])
    values = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(size)]
    w, e, velocity = trained(values[0]["w 0"], values[0]["e 0"], 2 * session_program.STEPS)
    for each in values:
        jobs.assert_identical(each, values[0])
        np.testing.assert_allclose(each["w end"], w, rtol=1e-9)
        np.testing.assert_allclose(each["e end"], e, rtol=1e-9)
        np.testing.assert_allclose(each["w/Momentum end"], velocity, rtol=1e-9)
        assert each["global_step end"] == 2 * session_program.STEPS


BASE = np.array([[0, 1, 0], [1, 0, 1]])  # what of_rank adds the rank to
EXPECTED = (
    {f"sum {dtype.name}": 2 * BASE + 1 for dtype in horovod_program.REDUCED}
    | {f"mean {dtype.name}": BASE + 1 for dtype in horovod_program.REDUCED}
    | {f"rows {dtype.name}": [[0, 1], [1, 2], [1, 2]] for dtype in horovod_program.SENT if dtype.name != "bool"}
    | {f"sent {dtype.name}": BASE + 1 for dtype in horovod_program.SENT if dtype.name != "bool"}
    | {"rows bool": [[False, True], [True, True], [True, True]], "sent bool": BASE + 1 > 0}
    | {"rows by name": [[1.0], [2.0], [2.0]]}
    | {"slices": [[1.5], [1.0], [0.0]], "compressed": [1.0, 0.333984375]}  # bfloat16's 1/3
    | {"sum": [3.0] * 3, "dense": [1.0, 0.5, 0.5], "towers": [5.5] * 3, "half": [60000.0, 1.0], "scaled": [0.5] * 3}
)


def test_horovods_operations_make_what_their_formulas_say(tmp_path):
    """In the end the two workers give one operation tensors of different sizes."""
    with clusters.programs(2, "horovod_program", str(tmp_path)) as workers:
        statuses = [each.process.wait(jobs.WAIT_SECS) for each in workers]
        outputs = [each.output() for each in workers]
    assert statuses == [2, 2], outputs
    assert_named("give tensors of different sizes to one operation between them", outputs)
    horovods = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    for values in horovods:
        assert values.keys() == EXPECTED.keys() | {"before", "after"}
        for name, value in EXPECTED.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)
        np.testing.assert_array_equal(values["after"], horovods[1]["before"])  # the variables of the root
    assert not np.array_equal(horovods[0]["before"], horovods[1]["before"])

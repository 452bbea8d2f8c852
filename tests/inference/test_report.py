"""Lines for people about an evaluation."""

from tower_train.inference import evaluator, report


def test_a_confusion_matrix_is_a_table_under_its_classes_names():
    lines = report.confusion_lines([[12345, 0], [7, 1]], ("cat", "aeroplane"))
    assert lines == [
        "confusion matrix (row: true class, column: predicted class)",
        "            cat aerop",
        "      cat 12345     0",
        "aeroplane     7     1",
    ]


def found(mean, count, is_proportion=True):
    interval = evaluator.wilson_interval(mean * count, count) if is_proportion else ()
    metrics = {"precision @ 1": evaluator.Metric(mean, *interval), "other": evaluator.Metric(0.0)}
    return evaluator.Evaluation(1, "data", count, "raw weights", metrics, None, (), 0.0)


def test_a_warning_when_they_part_beyond_chance():
    warning = report.overfitting(found(0.95, 1000), found(0.8, 1000))
    assert warning.startswith("*** precision @ 1 is 0.950 on training examples and 0.800 on the test examples:")
    assert report.overfitting(found(0.95, 1000), found(0.88, 1000)) is None, "not by much"
    assert report.overfitting(found(0.95, 20), found(0.8, 20)) is None, "by chance"
    assert report.overfitting(found(0.8, 1000), found(0.95, 1000)) is None
    assert report.overfitting(found(0.95, 1000, False), found(0.2, 1000, False)) is None, "no proportions"

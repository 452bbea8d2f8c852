"""Lines for people about an evaluation."""

from tower_train.inference import report


def test_a_confusion_matrix_is_a_table_under_its_classes_names():
    lines = report.confusion_lines([[12345, 0], [7, 1]], ("cat", "aeroplane"))
    assert lines == [
        "confusion matrix (row: true class, column: predicted class)",
        "            cat aerop",
        "      cat 12345     0",
        "aeroplane     7     1",
    ]

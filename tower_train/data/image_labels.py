"""Classes of images that do not lie in a folder per class: from a table (labels.csv) or from names (cat.0.jpg)."""

import csv
import operator
import os
import pathlib
import re

from tower_train import errors

FOLDERS, NAMES = "folders", "names"
EXTENSIONS = (".jpeg", ".jpg", ".png", ".gif", ".bmp", ".webp")
_UP_TO_NUMBER = re.compile(r"(.*?)[\W_]*\d+")  # cat of cat.0, great_pyrenees of great_pyrenees_12


def is_image(name: str) -> bool:
    """Returns whether a file counts as an image; hidden ones do not."""
    return name[0] != "." and name.lower().endswith(EXTENSIONS)


def readable(name: str) -> str:
    """Returns a file's name as text, for messages and class names: undecodable bytes become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")


def table_in(folder: pathlib.Path) -> str | None:
    """Returns the first CSV file of a folder."""
    return next((readable(path.name) for path in sorted(folder.glob("*.csv"))), None)


def advice(folder: pathlib.Path, directory: pathlib.Path) -> str:
    """Returns the --labels that fits images in a folder, or a table beside them; empty if none does."""
    if table := table_in(directory) or table_in(folder):
        return f" If {table} holds the classes, give --labels={table}."
    classes = set(filter(None, map(_class_in_name, filter(is_image, os.listdir(folder)))))
    if len(classes) > 1:
        return f" If files are named by class ({', '.join(sorted(classes)[:2])}, ...), give --labels={NAMES}."
    return ""


def find(directory: pathlib.Path, labels: str, option: str = "labels") -> tuple[dict[str, str], str]:
    """Finds the classes of all images below a directory, in folders of any depth.

    labels is 'names', by which a class is a file's name up to its last number; or a CSV file with a header, and after a
    colon the name of the column of classes, if there are more than two columns. The column of images is the one that
    names most in its first rows, by their paths or files' names, with or without extension. `option` gave it.

    Returns:
      {path below the directory: class}, sorted, of the images with a class; and a line on the others.

    Raises:
      DataError: no such file, or no table; an image with two classes.
      ConfigError: no such column.
    """
    paths = sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory)
        for name in names
        if is_image(name)
    )
    if labels == NAMES:
        classes, missing = {path: name for path in paths if (name := _class_in_name(os.path.basename(path)))}, 0
    else:
        classes, missing = _from_table(directory, labels, option, paths)
    notes = [(len(paths) - len(classes), "images without a class"), (missing, "classes without their image")]
    counts = " and ".join(f"{count} {what}" for count, what in notes if count)
    return classes, f"--labels={labels}: {counts} in {directory} left out." if counts else ""


def _class_in_name(name: str) -> str:
    """Returns the class in a file's name; empty if there is none."""
    match = _UP_TO_NUMBER.fullmatch(os.path.splitext(readable(name))[0])
    return match[1] if match else ""


def _from_table(directory: pathlib.Path, labels: str, option: str, paths: list[str]) -> tuple[dict[str, str], int]:
    """Returns {path: class}, and the number of rows that name no image."""
    table, column = _table(directory, labels, option)
    paths_by_name = {}
    # Of several files of one name the first: test/1.png often has no class, and HAM10000 is often unpacked twice.
    for path in sorted(paths, key=lambda path: not path.startswith("train")):
        for name in (path, os.path.basename(path)):
            paths_by_name.setdefault(name, path)
            paths_by_name.setdefault(os.path.splitext(name)[0], path)
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            header, *rows = ([cell.strip() for cell in row] for row in csv.reader(file) if row)
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is no CSV file with a header"
        if isinstance(error, UnicodeDecodeError):
            reason = f"byte {error.start} is not UTF-8; save it as UTF-8"
        raise errors.DataError(f"--{option}={labels}: {table} cannot be read: {reason}. Name a CSV file.") from None
    if uneven := next((number for number, row in enumerate(rows, 2) if len(row) != len(header)), None):
        raise errors.DataError(
            f"--{option}={labels}: row {uneven} of {table} has {len(rows[uneven - 2])} cells, its header "
            f"{len(header)}. Mend it: texts with commas stand in quotes."
        )
    image = max(range(len(header)), key=lambda i: sum(row[i] in paths_by_name for row in rows[:100]))
    if not any(row[image] in paths_by_name for row in rows[:100]):
        raise errors.DataError(
            f"--{option}={labels}: no column of {table} ({', '.join(header)}) names images below {directory}. It must "
            "hold their names, with or without extension."
        )
    others = [name for i, name in enumerate(header) if i != image]
    if not others:
        raise errors.DataError(f"--{option}={labels}: {table} has no column beside that of the images. Add one.")
    if column is None and len(others) == 1:
        column = others[0]
    if column not in others:
        raise errors.ConfigError(
            f"--{option}={labels}: {'which column is meant?' if column is None else 'there is no such column.'} "
            f"Give one of: {', '.join(f'--{option}={table.name}:{name}' for name in others)}."
        )
    place, classes, missing = header.index(column), {}, 0
    for row in filter(operator.itemgetter(place), rows):  # an image with an empty cell has no class
        path = paths_by_name.get(row[image])
        if path is None:
            missing += 1
        elif classes.setdefault(path, row[place]) != row[place]:
            raise errors.DataError(
                f"{table}: {row[image]} has {classes[path]} and {row[place]} as {column}. Leave one row an image."
            )
    return dict(sorted(classes.items())), missing


def _table(directory: pathlib.Path, labels: str, option: str) -> tuple[pathlib.Path, str | None]:
    """Returns the path of the table and the name of its column of classes, if given."""
    for name, column in ((labels, None), labels.rsplit(":", 1) if ":" in labels else (labels, None)):
        for path in (directory / name, directory / "train" / name, pathlib.Path(name).expanduser()):
            if path.is_file():
                return path, column
    others = f"{FOLDERS}, {NAMES} (the class of cat.0.jpg is cat) or " if option == "labels" else ""
    raise errors.DataError(
        f"--{option}={labels}: there is no such file in {directory}. Give {others}a CSV file, and its column if it has "
        "several: labels.csv:COLUMN."
    )

"""Writes NAME.py, a workload that trains as it is, for you to change: python -m tower_train.new_workload NAME

Exit status: 0 done, 2 the name or the file is wrong.
"""

import importlib.util
import keyword
import pathlib
import sys

from tower_train import console, errors
from tower_train.options import Options, command_line

_TEMPLATE = pathlib.Path(__file__).parent / "workloads" / "template.py"


def main(argv) -> int:
    names: list[str] = []
    command_line.parse(argv, Options, __doc__, files=names)
    if len(names) != 1 or not names[0].isidentifier() or keyword.iskeyword(names[0]):
        raise errors.ConfigError(
            f"Got {' '.join(names) or 'no name'}: give one name, of letters, digits and _, for the workload and "
            "its file."
        )
    [name] = names
    if (name in sys.modules or importlib.util.find_spec(name)) and not pathlib.Path(f"{name}.py").exists():
        raise errors.ConfigError(f"{name} is a module already, which the file would hide. Give another name.")
    text = _TEMPLATE.read_text().replace("MODULE", name).replace('"NAME"', f'"{name}"')
    path = pathlib.Path(f"{name}.py")
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        raise errors.ConfigError(f"{path} is there already. Give another name.") from None
    except OSError as error:
        raise errors.ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    console.say(f"Written: {path}. Train it: python -m tower_train --workload={name} --num_gpus=2")
    return 0


if __name__ == "__main__":
    command_line.run(main)

"""Prints how long the check of a run takes, in times of `import tensorflow`: the tutorial's network and 20 layers.

Usage: python tests/proof/cost.py, on an idle machine; each is the least of three processes.
"""

import re
import subprocess
import sys
import tempfile

IMPORT = "import time; began = time.perf_counter(); import tensorflow; print(f'{time.perf_counter() - began} s)')"
RUN = ["-m", "tower_train", "--num_gpus=2", "--batch_size=64", "--check_towers=2", "--max_steps=1"]


def seconds(*words):
    """The time that a Python process prints, the least of three."""
    return min(_printed(words) for _ in range(3))


def _printed(words):
    with tempfile.TemporaryDirectory() as folder:
        more = [f"--train_dir={folder}/run"] if "tower_train" in words else []
        process = subprocess.run([sys.executable, *words, *more], capture_output=True, text=True, check=True)
    return float(re.findall(r"([\d.]+) s\)", process.stdout)[0])


def main():
    of_import = seconds("-c", IMPORT)
    print(f"import tensorflow: {of_import:.1f} s")
    for name, recipe in (("the tutorial's network", []), ("resnet20", ["--recipe=resnet20"])):
        of_check = seconds(*RUN, *recipe)
        print(f"the check of {name}: {of_check:.1f} s, {of_check / of_import:.2f} of an import", flush=True)


if __name__ == "__main__":
    main()

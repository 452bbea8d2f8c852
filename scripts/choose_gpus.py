"""Three ways to choose the GPUs that train. Each trains for a step and prints the towers' devices.

CUDA_VISIBLE_DEVICES=0,2 python scripts/choose_gpus.py      # the program sees two GPUs and uses both
python scripts/choose_gpus.py --gpus=0,2                    # it sees all and uses these
python scripts/choose_gpus.py --towers=3                    # it uses the first three; works without GPUs too
"""

import argparse
import os

from tower_train import console
from tower_train.options import command_line


def ids(text):
    return [int(i) for i in text.split(",")]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
chosen = parser.add_mutually_exclusive_group()
chosen.add_argument("--gpus", type=ids, help="ids of GPUs, such as 0,2")
chosen.add_argument("--towers", type=console.count, help="how many GPUs")
chosen.add_argument("--visible", help="like CUDA_VISIBLE_DEVICES, but set within the program")
options = parser.parse_args()
if options.visible is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = options.visible  # counts only before TensorFlow looks for GPUs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tower_train  # noqa: E402


def main(_):
    print(f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}")
    print(f"GPUs that this program sees: {len(tf.config.list_physical_devices('GPU'))}")
    gpus = options.gpus or options.towers  # None: all
    with tf.device("/cpu:0"):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    parallel_model = tower_train.multi_gpu_model(model, gpus=gpus)
    parallel_model.compile(loss="mse", optimizer="sgd")
    parallel_model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    print(f"multi_gpu_model(gpus={gpus}) trained on: {', '.join(parallel_model.towers)}")
    return 0


if __name__ == "__main__":
    command_line.run(main)  # mistakes end in one line

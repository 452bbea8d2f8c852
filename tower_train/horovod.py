"""Horovod's names for programs that were written for it: import tower_train.horovod as hvd.

Such a program also needs master=hvd.target() for its session, and hvd.session_config() instead of
tf.compat.v1.ConfigProto(). `init` gives each worker its GPUs; visible_device_list has no effect.
"""

from tower_train.fronts.horovod import *  # noqa: F403
from tower_train.fronts.horovod import __all__  # noqa: F401

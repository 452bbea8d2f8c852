"""One section of gpu_check: python -m gpu_checks MODULE:FUNCTION SETTINGS, the latter in JSON."""

import faulthandler
import importlib
import json
import os
import sys

from gpu_checks import findings

_STACKS_BEFORE_END_SECS = 3  # of a section that hangs

if __name__ == "__main__":
    (module, _, function), settings = sys.argv[1].partition(":"), findings.Settings(**json.loads(sys.argv[2]))
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, settings.left() - _STACKS_BEFORE_END_SECS))
    with findings.attempt("this section came to its end"):
        getattr(importlib.import_module(module), function)(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what TensorFlow does at the end of a process is not what is checked

"""One section of gpu_check: python -m gpu_checks MODULE:FUNCTION SETTINGS, the latter in JSON."""

import faulthandler
import importlib
import json
import os
import sys
import traceback

from gpu_checks.findings import FAILED, Findings, Settings, short

_STACKS_BEFORE_END_SECS = 3  # of a section that hangs


def main(argv):
    module, _, function = argv[1].partition(":")
    settings = Settings(**json.loads(argv[2]))
    findings = Findings(settings.findings)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, settings.seconds - _STACKS_BEFORE_END_SECS))
    try:
        getattr(importlib.import_module(module), function)(findings, settings)
    except Exception as error:
        traceback.print_exc()
        findings.add(FAILED, "this section came to its end", error=short(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what TensorFlow does at the end of a process is not what is checked


if __name__ == "__main__":
    main(sys.argv)

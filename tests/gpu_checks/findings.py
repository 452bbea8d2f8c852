"""The findings of a section: lines of its output that begin with a verdict. No TensorFlow here."""

import contextlib
import time
import traceback
from typing import NamedTuple

OK, FAILED, MEASURED, UNCHECKED = "ok", "FAILED", "measured", "not checked"
VERDICTS = (FAILED, UNCHECKED, OK, MEASURED)  # the worst first
COMPILED = "kernels compiled when first used"  # of a GPU


class Settings(NamedTuple):
    """The settings of a section: when it has to end, whether only what is cheap on CPUs is wanted, a folder of its own,
    and that of the drawn images for all."""

    end: float
    quick: bool
    scratch: str
    data_dir: str

    def left(self) -> float:
        return self.end - time.time()


def add(verdict: str, what: str, **numbers) -> None:
    """Writes one finding; the numbers are what it rests on, by name."""
    shown = ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                      for name, value in numbers.items())  # fmt: skip
    print(" ".join(f"{verdict}: {what}{f' ({shown})' if shown else ''}".split()), flush=True)


def check(holds, what: str, **numbers) -> None:
    """Writes whether something holds."""
    add(OK if holds else FAILED, what, **numbers)


def unchecked(what: str, why: str) -> None:
    add(UNCHECKED, f"{what}: {why}")


@contextlib.contextmanager
def attempt(what: str):
    """Makes an exception within this block a finding, after which the section goes on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        add(FAILED, what, error=text if len(text) < 500 else f"{text[:150]} ... {text[-300:]}")  # TensorFlow's cause


def read(output: str) -> list[str]:
    """Returns the findings in a section's output."""
    return [line for line in output.splitlines() if line.startswith(tuple(f"{verdict}: " for verdict in VERDICTS))]

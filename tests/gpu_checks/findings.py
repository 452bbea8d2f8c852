"""The findings of a section, written one by one, so that a crash loses none. No TensorFlow here."""

import contextlib
import dataclasses
import json
import time
import traceback

OK, FAILED, MEASURED, UNCHECKED = "ok", "FAILED", "measured", "not checked"
COMPILED = "compiled when first used"  # the kernels of a GPU
VERDICTS = (FAILED, UNCHECKED, OK, MEASURED)  # the worst first


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a section: its time limit, whether only what is cheap on CPUs is wanted, a folder of its own,
    that of the drawn images for all, the file for its findings, and when it began."""

    seconds: float
    quick: bool
    scratch: str
    data_dir: str
    findings: str
    started: float = dataclasses.field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)


class Findings:
    def __init__(self, path: str):
        self._file = open(path, "a")

    def add(self, verdict: str, what: str, **numbers) -> None:
        """Writes one finding; the numbers are what it rests on, by name."""
        self._file.write(json.dumps({"verdict": verdict, "what": what, "numbers": numbers}) + "\n")
        self._file.flush()
        print(shown({"verdict": verdict, "what": what, "numbers": numbers}), flush=True)

    def check(self, holds, what: str, **numbers) -> None:
        """Writes whether something holds."""
        self.add(OK if holds else FAILED, what, **numbers)

    def measured(self, what: str, **numbers) -> None:
        self.add(MEASURED, what, **numbers)

    def unchecked(self, what: str, why: str) -> None:
        self.add(UNCHECKED, what, why=why)

    @contextlib.contextmanager
    def attempt(self, what: str):
        """Makes an exception within this block a finding, after which the section goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(FAILED, what, error=short(error))


def short(error: Exception) -> str:
    """An error in a few words: its first ones, and the last ones, in which TensorFlow has the cause."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 500 else f"{text[:150]} ... {text[-300:]}"


def read(path: str) -> list[dict]:
    """The findings in a file; a last line that is cut off does not count."""
    found = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError), open(path) as lines:
        for line in lines:
            found.append(json.loads(line))
    return found


def shown(finding: dict) -> str:
    if finding["verdict"] == UNCHECKED:
        return f"{UNCHECKED}: {finding['what']}: {finding['numbers'].get('why')}"
    numbers = ", ".join(f"{name} {_as_text(value)}" for name, value in finding["numbers"].items())
    return f"{finding['verdict']}: {finding['what']}{f' ({numbers})' if numbers else ''}"


def _as_text(value) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return ", ".join(map(_as_text, value)) if isinstance(value, list | tuple) else " ".join(str(value).split())

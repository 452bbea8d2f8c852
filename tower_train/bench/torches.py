"""The sides of PyTorch, with each version that is installed or in TORCH_PATHS."""

import importlib.metadata
import os

from tower_train import errors
from tower_train.bench.sides import Side

TORCH_PATHS = "TORCH_PATHS"  # environment variable: folders of packages, each with another PyTorch, separated by :


def torch_sides(network: str, about: dict, is_on_gpu: bool) -> list[Side]:
    """Returns the sides of a network of torch_fit, with each PyTorch that is installed or in TORCH_PATHS.

    Args:
      network: its name there.
      about: numbers of the recipe.
      is_on_gpu: whether it also trains by torch.compile, which on CPUs is for other networks.
    """
    sides = []
    for version, packages in torches():
        for form in ("", "compiled") if is_on_gpu else ("",):
            for dtype in ("float32", "bfloat16"):
                parts = list(filter(None, [version, form, dtype if dtype != "float32" else ""]))
                arguments = dict(network=network, about=about, autocast=dtype != "float32", compiled=bool(form))
                sides.append(
                    Side(
                        f"torch {'/'.join(parts)}",
                        "tower_train.bench.torch_fit:train",
                        arguments,
                        dtype=dtype,
                        is_quick=not form,
                        label=f"PyTorch {', '.join(parts)}",
                        packages=packages,
                        without_tensorflow=True,
                    )
                )
    return sides


def torches() -> list[tuple[str, str | None]]:
    """Returns (version, folder of packages or None) of each PyTorch; ConfigError for a folder without one, or with a
    version that is there already."""

    def version(*path: str) -> str | None:
        there = importlib.metadata.distributions(name="torch", **({"path": list(path)} if path else {}))
        return next((each.version for each in there), None)

    found = {installed: None} if (installed := version()) else {}
    for path in filter(None, os.environ.get(TORCH_PATHS, "").split(os.pathsep)):
        if (number := version(path)) is None or number in found:
            holds = f"PyTorch {number}, as another place does" if number else "no PyTorch"
            raise errors.ConfigError(
                f"{TORCH_PATHS}: {path} holds {holds}. Name folders such as /other/lib/python3.12/site-packages."
            )
        found[number] = path
    return list(found.items())

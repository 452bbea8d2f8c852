"""Exporters, which write SavedModels of the models that train_and_evaluate has evaluated."""

import abc
import os
import pathlib
import shutil
from collections.abc import Callable

from tower_train import errors
from tower_train.fronts.tf_estimator import eval_events
from tower_train.fronts.tf_estimator.tower_estimator import Estimator


class Exporter(abc.ABC):
    """Base of exporters."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the directory in model_dir/export."""

    @abc.abstractmethod
    def export(
        self, estimator: Estimator, export_path: str, checkpoint_path: str, eval_result: dict, is_the_final_export: bool
    ) -> bytes | None:
        """Called after each evaluation; returns the path of the export, or None."""


class _SavedModelExporter(Exporter):
    """Writes a SavedModel into export_path/TIME.

    Args:
      name: of the directory in model_dir/export.
      serving_input_receiver_fn, assets_extra, as_text: as for Estimator.export_saved_model.
    """

    def __init__(self, name: str, serving_input_receiver_fn: Callable, assets_extra: dict | None = None, as_text=False):
        self._name, self._arguments = name, (serving_input_receiver_fn, assets_extra, as_text)

    @property
    def name(self) -> str:
        return self._name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        return estimator.export_saved_model(export_path, *self._arguments, checkpoint_path)


class FinalExporter(_SavedModelExporter):
    """Exports the model once, at the end of training."""

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        if not is_the_final_export:
            return None
        return super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)


class LatestExporter(_SavedModelExporter):
    """Exports each evaluated model and keeps the newest ones.

    Args:
      exports_to_keep: their number; None for all.
      others: as for FinalExporter.
    """

    def __init__(self, name, serving_input_receiver_fn, assets_extra=None, as_text=False, exports_to_keep=5):
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text)
        self._keep = _checked(exports_to_keep)

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        exported = super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)
        _keep_newest(export_path, self._keep)
        return exported


class BestExporter(LatestExporter):
    """Exports a model whenever its evaluation is better than all before, including those of earlier runs.

    Args:
      event_file_pattern: of the files in model_dir with the events of earlier evaluations; None begins anew.
      compare_fn: (best_eval_result, current_eval_result) -> whether the current one is better; by default a smaller
        loss.
      others: as for LatestExporter.
    """

    def __init__(
        self, name="best_exporter", serving_input_receiver_fn=None, event_file_pattern="eval/*.tfevents.*",
        compare_fn=None, assets_extra=None, as_text=False, exports_to_keep=5,
    ):  # fmt: skip
        if serving_input_receiver_fn is None:
            raise errors.ConfigError("BestExporter: serving_input_receiver_fn is missing.")
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        self._pattern, self._is_better = event_file_pattern, compare_fn or _has_smaller_loss
        self._best = None

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        if self._best is None and self._pattern and os.path.isdir(export_path):
            self._best = self._best_before(pathlib.Path(estimator.model_dir), eval_result)
        if self._best is not None and not self._is_better(self._best, eval_result):
            return None
        self._best = eval_result
        return super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)

    def _best_before(self, model_dir: pathlib.Path, now: dict) -> dict | None:
        """Returns the best evaluation in event files, except the newest."""
        best = None
        for step, found in eval_events.read(model_dir.glob(self._pattern)):
            if step != now.get("global_step") and (best is None or self._is_better(best, found)):
                best = found
        return best


def _has_smaller_loss(best: dict, current: dict) -> bool:
    if "loss" not in best or "loss" not in current:
        raise errors.ConfigError(f"BestExporter compares 'loss', but the evaluation gave {', '.join(current)}.")
    return current["loss"] < best["loss"]


def _checked(exports_to_keep: int | None) -> int | None:
    if exports_to_keep is not None and exports_to_keep <= 0:
        raise errors.ConfigError(f"exports_to_keep={exports_to_keep}; it must be at least 1, or None for all.")
    return exports_to_keep


def _keep_newest(folder: str, keep: int | None) -> None:
    exports = sorted(
        (path for path in pathlib.Path(folder).iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    for old in exports[:-keep] if keep else []:
        shutil.rmtree(old)

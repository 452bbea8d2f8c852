"""The SavedModel of a model_fn."""

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator.model import Model
from tower_train.fronts.tf_estimator.monitored_sessions import Sessions, local_init_op
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys

v1 = tf.compat.v1


class Form(NamedTuple):
    """The form of an export.

    Attributes:
      assets: {path within the export's assets.extra: file to copy there}.
      as_text: whether to write text instead of binary protocol buffers.
      strip: whether to leave out the default attributes of ops.
    """

    assets: dict
    as_text: bool
    strip: bool = True


def write(base: str, model: Model, sessions: Sessions, receivers: dict, path: str | None, form: Form) -> bytes:
    """Writes a graph for each mode, with one set of variables, into a new directory under base; returns its path.

    Args:
      base: the directory of exports.
      model: makes the graphs.
      sessions: opens them.
      receivers: {mode: function that returns the graph's inputs}.
      path: of a checkpoint; None for the initial values of training.
      form: of the export.

    Raises:
      ConfigError: other modes.
    """
    modes = [mode for mode in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT) if receivers.get(mode)]
    if not modes or len(modes) != len(receivers):
        raise errors.ConfigError(
            f"modes={', '.join(map(repr, receivers)) or 'none'}; each must be one of ModeKeys, with a function."
        )
    with _new_directory(base, form.assets) as (temporary, directory):
        builder = v1.saved_model.Builder(temporary)
        for mode in modes:
            with model.graph():
                receiver = receivers[mode]()
                spec, step = model.build_for_export(mode, receiver)
                saver = spec.scaffold.saver or v1.train.Saver(sharded=True)
                with sessions.open_for_export(path, spec, saver) as session:
                    add = builder.add_meta_graph
                    if mode == modes[0]:
                        add = functools.partial(builder.add_meta_graph_and_variables, session)
                    add(**_meta_graph(receiver, spec, step), saver=saver, strip_default_attrs=form.strip)
        builder.save(form.as_text)
    return directory


def _meta_graph(receiver, spec: EstimatorSpec, step: tf.Operation | None) -> dict:
    """Returns a SavedModel's entries about the default graph: its tags, signatures, assets and initialisation."""
    outputs = compat.export_outputs_for_mode(
        spec.mode, spec.export_outputs, spec.predictions, spec.loss, spec.eval_metric_ops
    )
    alternatives = getattr(receiver, "receiver_tensors_alternatives", None)
    is_served = spec.mode == ModeKeys.PREDICT
    if step is not None:
        v1.add_to_collection(compat.TRAIN_OP_KEY, step)
    return {
        "tags": compat.EXPORT_TAG_MAP[spec.mode],
        "signature_def_map": compat.build_all_signature_defs(
            receiver.receiver_tensors, outputs, alternatives, is_served
        ),
        "assets_collection": v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
        "main_op": local_init_op(spec.scaffold),
    }


@contextlib.contextmanager
def _new_directory(base: str, assets: dict) -> Iterator[tuple[bytes, bytes]]:
    """Makes a directory under base, named by the time; yields the path to write to and the final path.

    They differ so that watchers of the base directory never find half a model.

    Args:
      base: the directory of exports.
      assets: as of Form.
    """
    directory = compat.get_timestamped_export_dir(base)
    temporary = compat.get_temp_export_dir(directory)
    yield temporary, os.fsencode(directory)
    for name, source in assets.items():
        target = os.path.join(os.fsdecode(temporary), "assets.extra", name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(source, target)
    os.rename(temporary, directory)

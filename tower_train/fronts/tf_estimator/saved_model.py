"""The SavedModel of a model_fn."""

import contextlib
import os
import shutil
from collections.abc import Iterator

import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys

v1 = tf.compat.v1


class Writer:
    """Writes the graphs of several modes, with one set of variables, into one directory.

    Args:
      directory: it must not be there yet.
      strip_default_attrs: whether to leave out what older versions of TensorFlow need not be told.
    """

    def __init__(self, directory: bytes, strip_default_attrs: bool):
        self._builder = v1.saved_model.Builder(directory)
        self._strip, self._has_variables = strip_default_attrs, False

    def add(self, session: v1.Session, saver: v1.train.Saver, receiver, spec: EstimatorSpec, step) -> None:
        """Adds the session's graph; with the first one, its variables.

        Args:
          session: has the variables' values.
          saver: of this graph.
          receiver: the inputs.
          spec: the outputs.
          step: the op that trains; None for other modes.
        """
        outputs = compat.export_outputs_for_mode(
            spec.mode, spec.export_outputs, spec.predictions, spec.loss, spec.eval_metric_ops
        )
        alternatives = getattr(receiver, "receiver_tensors_alternatives", None)
        is_served = spec.mode == ModeKeys.PREDICT
        signatures = compat.build_all_signature_defs(receiver.receiver_tensors, outputs, alternatives, is_served)
        if step is not None:
            v1.add_to_collection(compat.TRAIN_OP_KEY, step)
        add = self._builder.add_meta_graph if self._has_variables else self._add_with_variables(session)
        add(
            tags=compat.EXPORT_TAG_MAP[spec.mode], signature_def_map=signatures,
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS), main_op=local_init_op(spec),
            saver=saver, strip_default_attrs=self._strip,
        )  # fmt: skip
        self._has_variables = True

    def _add_with_variables(self, session: v1.Session):
        def add(**arguments):
            self._builder.add_meta_graph_and_variables(session, **arguments)

        return add

    def save(self, as_text: bool) -> None:
        """Writes the graphs, as text or as binary protocol buffers."""
        self._builder.save(as_text)


def local_init_op(spec: EstimatorSpec) -> tf.Operation:
    """The op that initialises local variables and tables."""
    return spec.scaffold.local_init_op or v1.train.Scaffold.default_local_init_op()


@contextlib.contextmanager
def new_directory(base: str, assets: dict) -> Iterator[tuple[bytes, bytes]]:
    """Makes a directory under base, named by the time; yields the path to write to and the path that becomes.

    It has another name first: whoever watches the base directory must not find half a model.

    Args:
      base: the directory of exports.
      assets: {path within the export's assets.extra: file to copy there}.
    """
    directory = compat.get_timestamped_export_dir(base)
    temporary = compat.get_temp_export_dir(directory)
    yield temporary, os.fsencode(directory)
    for name, source in assets.items():
        target = os.path.join(os.fsdecode(temporary), "assets.extra", name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(source, target)
    os.rename(temporary, directory)

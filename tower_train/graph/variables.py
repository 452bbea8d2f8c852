"""Copies of the network's variables: the originals, and a copy on each further device if they are mirrored.

The originals have the names of checkpoints. The others are local variables, initialised from the originals' values.
"""

import contextlib
import copy
import functools
import hashlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.graph import collected, random_state
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.layout import Tower

v1 = tf.compat.v1


class Variables:
    """One copy of the variables, on one device."""

    def __init__(self, device: str = HOST, index: int = 0, originals: "Variables | None" = None):
        """index: over this worker's copies; originals: to be copied, None for the originals themselves."""
        self.device, self._originals = device, originals
        self._scope = f"copy_{index}/" if originals else ""  # before the names of its variables
        # {canonical name: (this copy's variable, its regularizer or None)} of the network, in the order of creation
        self.by_name: dict[str, tuple[tf.Variable, Callable | None]] = {}
        # {name of an original: the collections in which it was created}
        self.collections: dict[str, tuple[str, ...]] = {}
        self.trained_originals: list[tf.Variable] = []  # the originals that are trained, in the order of creation
        # variables of its optimizer and its moving averages, in the order of creation
        self.states: list[tf.Variable] = []
        self.decays: list[tf.Tensor] = []  # the values of the regularizers, in the order of the variables

    @contextlib.contextmanager
    def tower(self, tower: Tower, getter: Callable) -> Iterator[None]:
        """Builds a tower within this block: on its device, in its name scope, on these variables; tower 0 creates them.

        getter: custom getter for initial values, such as `seeded(seed)`. Raises GraphError if a later tower
        would create a variable, or some cannot be copied.
        """
        if self._originals and not self.by_name:
            self._copy_network(self._originals.by_name)
        originals = self._originals or self
        self.trained_originals = v1.trainable_variables()  # tower 0's; the collection will hold copies
        with (
            collected.collections_of_tower(self.decays, originals.collections) as note,
            contextlib.ExitStack() as scopes,
        ):

            def enter_scope(getter: Callable, reuse=None) -> None:
                scope = v1.get_variable_scope()
                scopes.enter_context(v1.variable_scope(scope, reuse=reuse, custom_getter=getter))

            scopes.enter_context(tf.variable_creator_scope(functools.partial(self._create, tower)))
            # AUTO_REUSE, not True: a variable that tower 0 lacks must reach `_create`, whose error names it.
            enter_scope(functools.partial(self._get, tower, note), tower.index > 0 and v1.AUTO_REUSE)
            scopes.enter_context(tf.device(tower.device))
            scopes.enter_context(v1.name_scope(f"tower_{tower.index}/"))
            enter_scope(getter)
            enter_scope(kept_in_full_precision)  # the last getter is called first
            yield

    def _create(self, tower: Tower, create_variable: Callable, **kwargs) -> tf.Variable:
        """Creates a variable of the network for tower 0; a variable_creator."""
        if tower.index:
            which = f"the variable {kwargs['name']!r}" if kwargs.get("name") else "a variable without a name"
            raise errors.GraphError(
                f"tower_{tower.index} would create {which}, which tower_0 did not create. "
                + (
                    _OF_KERAS
                    if random_state.is_of_keras(traceback.extract_stack())
                    else "Create variables with tf.compat.v1.get_variable under names that are the same in every call "
                    "of inference and loss."
                )
            )
        with tf.device(self.device):
            created = create_variable(**(kwargs if self.device == HOST else _initialized_on_host(kwargs)))
        self.trained_originals += [created] if created.trainable else []
        names = kwargs.get("collections") or [v1.GraphKeys.GLOBAL_VARIABLES]
        trainable = [v1.GraphKeys.TRAINABLE_VARIABLES] * created.trainable
        self.collections[created.op.name] = tuple(dict.fromkeys([*names, *trainable]))
        return created

    def _get(self, tower: Tower, note: Callable, get_variable: Callable, name: str, *args, **kwargs):
        """Gets this copy of a variable; a custom getter."""
        regularizer = args[3] if len(args) > 3 else kwargs.get("regularizer")  # a getter of the program may give it so
        if kwargs.get("partitioner"):
            raise errors.GraphError(
                f"{name} has a partitioner: each copy of a variable is whole, on one device. Leave the partitioner "
                "out, here or in the variable_scope around it."
            )
        decays = v1.get_collection_ref(v1.GraphKeys.REGULARIZATION_LOSSES)
        before = len(decays)
        name = name.removeprefix(self._scope)  # a name made of a copy's, as of its moving average
        variable = get_variable(name, *args, **kwargs)
        # plain tensors instead of TensorFlow's objects, which compute the regularizer anew at each use
        decays[before:] = [each.op.outputs[each.value_index] for each in decays[before:]]
        self.decays += decays[before:]
        if tower.index == 0:
            self.by_name.setdefault(variable.op.name, (variable, regularizer))
        copy = self.local_copy(variable)
        note(variable.op.name, copy)
        # what a tower assigns to one that is not trained becomes a statistic, its mean over towers
        return copy if variable.trainable else collected.assigned_once(copy)

    def gradients(self, loss: tf.Tensor) -> GradientsAndVariables:
        """Returns the gradients of a tower's loss for these trained variables, each with the original."""
        # of the copy, but named by the originals, by which replicas are averaged
        return list(zip(v1.gradients(loss, self.trained()), self.trained_originals, strict=True))

    def trained(self) -> list[tf.Variable]:
        """Returns the trained variables."""
        return [self.local_copy(variable) for variable in self.trained_originals]

    def canonical_name(self, variable: tf.Variable) -> str:
        """Returns the canonical name of one of these variables."""
        return variable.op.name.removeprefix(self._scope)

    def copied(self) -> list[tf.Variable]:
        """Returns the variables that every copy has, in the same order."""
        return [*(variable for variable, _ in self.by_name.values()), *self.states]

    @contextlib.contextmanager
    def more_states(self) -> Iterator[None]:
        """Adds the variables created within this block, such as the optimizer's slots, to the states."""

        def create(create_variable, **kwargs):
            if self._originals:  # each copy makes its states in one order: this is that of the same index
                kwargs |= _as_copy(self._originals.states[len(self.states)])
            self.states.append(create_variable(**kwargs))
            return self.states[-1]

        with tf.device(self.device), tf.variable_creator_scope(create):
            yield

    def local_copy(self, original: tf.Variable) -> tf.Variable:
        """Returns this copy of an original; the original itself if it has none."""
        return self.by_name.get(original.op.name, (original, None))[0]

    def _copy_network(self, originals: dict[str, tuple[tf.Variable, Callable | None]]) -> None:
        """Copies all variables that tower 0 asked for."""
        for variable in v1.trainable_variables():
            if variable.op.name not in originals:
                advice = "Get it there, or use --variable_update=cpu."
                raise errors.GraphError(
                    f"{variable.op.name} cannot be mirrored: the network did not get it from "
                    "tf.compat.v1.get_variable. "
                    + (_OF_KERAS if random_state.is_of_keras(variable.handle.op.traceback) else advice)
                )
        for name, (original, regularizer) in originals.items():
            with tf.device(self.device):
                copy = v1.Variable(
                    name=f"{self._scope}{name}",
                    dtype=original.dtype.base_dtype,
                    use_resource=True,
                    **_as_copy(original),
                )
                copy._trainable = original.trainable  # in no collection; tapes, as tf.recompute_grad's, look at it
                self.by_name[name] = copy, regularizer
                if regularizer:
                    with v1.name_scope(f"{copy.op.name}/Regularizer/"):
                        decay = regularizer(copy)
                    self.decays += [] if decay is None else [decay]  # None: tf.compat.v1.no_regularizer's


_OF_KERAS = (
    "It is a Keras layer's or metric's. Make layers once, as a model for tower_train.keras_network, and name metrics "
    "in Workload(metrics=...)."
)


def _initialized_on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a variable that is initialised on the host."""
    initial_value = kwargs.get("initial_value")  # GPUs would draw other numbers from a seed, and call no Python
    if not callable(initial_value):
        return kwargs
    with tf.init_scope(), tf.device(HOST), v1.name_scope(f"{kwargs.get('name') or 'Variable'}/Initializer/"):
        return kwargs | {"initial_value": initial_value()}


def _as_copy(original: tf.Variable) -> dict[str, Any]:
    """Returns the arguments that make a variable a copy."""
    # Read on the original's device and given as a value: a function's result would be on the copy's.
    with tf.init_scope(), v1.get_default_graph().colocate_with(None, True), tf.device(original.device):
        value = original.read_value()
    return {
        "initial_value": value,
        "trainable": False,
        "constraint": original.constraint,
        "collections": [v1.GraphKeys.LOCAL_VARIABLES],
    }


def variable_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of variables, gradients and losses: that of the arithmetic, but never below float32."""
    # a weight's change in a step is often too small for 16 bits (Micikevicius et al. 2018, "Mixed precision training")
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype


def kept_in_full_precision(getter, name, shape=None, dtype=tf.float32, initializer=None, *args, **kwargs):
    """Gets a float32 variable, cast to the lower dtype that the network asks for; a custom getter."""
    dtype = tf.as_dtype(dtype)
    if initializer is not None and not callable(initializer):  # a value, whose dtype is that of the variable
        value = tf.convert_to_tensor(initializer)
        dtype, initializer = value.dtype, tf.cast(value, variable_dtype(value.dtype))
    variable = getter(name, shape, variable_dtype(dtype), initializer, *args, **kwargs)
    if variable.dtype.base_dtype == dtype:
        return variable
    return tf.cast(variable, dtype)


def seeded(seed: int):
    """Returns a custom getter that seeds initializers by name: default seeds depend on the number of ops and towers."""

    def with_seed(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
        if initializer is None and tf.as_dtype(dtype).is_floating:
            initializer = v1.glorot_uniform_initializer()  # get_variable's own default for floating-point variables
        if isinstance(initializer, type):
            initializer = initializer()
        is_keras = getattr(initializer, "_init_seed", 0) is None
        if is_keras or getattr(initializer, "seed", 0) is None:
            # by name, so that a new layer does not change the others' weights
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            number = int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
            if is_keras or hasattr(initializer, "_random_generator"):  # they have made numbers of a seed already
                initializer = type(initializer).from_config(initializer.get_config() | {"seed": number})
            else:
                initializer = copy.copy(initializer)  # the caller may share it between variables
                initializer.seed = number
        return getter(name, shape, dtype, initializer, *args, **kwargs)

    return with_seed

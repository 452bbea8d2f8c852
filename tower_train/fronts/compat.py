"""The private names of Keras and TensorFlow on which the fronts depend, and temporary replacements in them.

Every such name stands here, behind a small function or constant. tests/fronts fail when one vanishes or changes its
meaning; setup.py bounds the versions with which they pass.
"""

import contextlib
import contextvars
import functools
import importlib
import inspect
import operator
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import config as backend_config
from keras.src.backend import random as backend_random
from keras.src.backend import tensorflow as backend_tensorflow
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib, serialization_lib
from keras.src.trainers import data_adapters, trainer
from keras.src.utils import python_utils
from tensorflow.core.framework.device_attributes_pb2 import DeviceAttributes
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.core import config as conversions
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.client import device_lib, session
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import ops
from tensorflow.python.framework import random_seed as seeds_of_ops
from tensorflow.python.ops import (
    array_ops,
    control_flow_ops,
    gen_random_ops,
    gen_resource_variable_ops,
    gen_state_ops,
    gradients_util,
    lookup_ops,
    resource_variable_ops,
    summary_ops_v2,
    variable_scope,
)
from tensorflow.python.training.saving import saveable_object_util
from tensorflow.python.util import tf_decorator

from tower_train.graph.stream import not_tuned

_SEED_GENERATOR = "global_seed_generator"  # Keras' global attribute: of draws without a seed
_LAYER_COUNTS = "object_name_uids"  # Keras' global attribute {prefix of a layer's name: how many there are}

_DRAWS_OF_KERAS = "normal truncated_normal uniform randint dropout beta binomial categorical gamma shuffle".split()
_DRAWS_OF_TENSORFLOW = "random_standard_normal random_uniform random_uniform_int truncated_normal".split()

BaseOptimizer = base_optimizer.BaseOptimizer  # of all Keras optimizers
FIRST_EPOCH = "_initial_epoch"  # attribute of a model: the epoch with which `fit` begins, as BackupAndRestore sets it
storage = operator.attrgetter("_value")  # a Keras variable's tf.Variable; None before it has a value
pending_initializer = operator.attrgetter("_initializer")  # of a variable made in a StatelessScope, else None
trained_by = operator.attrgetter("_trainable_variables")  # the variables that a built optimizer trains
loss_tracker = operator.attrgetter("_loss_tracker")  # a model's metric that `fit` reports as "loss"
sublayers = operator.methodcaller("_flatten_layers", include_self=False)  # of a model: nested ones too
random_seed = context.global_seed  # () -> the last argument of tf.random.set_seed
without_tapes = record.stop_recording  # context manager: GradientTapes of this thread record nothing
eager_mode = tf.__internal__.eager_context.eager_mode  # context manager: eager execution, even with a default graph


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces an attribute of a class or of one object within this block, unseen by Keras' and TensorFlow's trackers.

    Args:
      owner: a class, a module or an object with a __dict__.
      name: the attribute, which may be inherited.
      replacement: its value within the block; for a static method of a class, a staticmethod.
    """
    plain = isinstance(owner, (type, types.ModuleType))
    set_, delete = (setattr, delattr) if plain else (object.__setattr__, object.__delattr__)
    is_own, before = name in vars(owner), vars(owner).get(name)
    set_(owner, name, replacement)
    try:
        yield
    finally:
        if is_own:
            set_(owner, name, before)
        else:
            delete(owner, name)


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Gives a context variable a value within this block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def thread_state() -> Callable[[], contextlib.AbstractContextManager]:
    """Returns a function whose context manager gives another thread this one's default graph, with its devices, names,
    control dependencies and variables' scope, and Keras' and summaries' settings; Keras counts layers from 0 on."""
    graph, scope = tf.compat.v1.get_default_graph(), tf.compat.v1.get_variable_scope()
    graph.switch_to_thread_local()
    stacks = {name: getattr(graph, name) for name in ("_device_function_stack", "_colocation_stack")}
    control, creators, names = (graph._control_dependencies_stack, graph._variable_creator_stack, graph._name_stack)
    keras_settings = vars(global_state.GLOBAL_STATE_TRACKER) | {_LAYER_COUNTS: None}
    summary_settings = dict(vars(summary_ops_v2._summary_state))

    @contextlib.contextmanager
    def inherited() -> Iterator[None]:
        # Towers that meet within a layer are at different depths of stacks such as that of name scopes.
        own = {name: value[:] if isinstance(value, list) else value for name, value in keras_settings.items()}
        vars(global_state.GLOBAL_STATE_TRACKER).update(own)
        vars(summary_ops_v2._summary_state).update(summary_settings)
        with tf.Graph.as_default(graph):  # not FuncGraph's, which changes what all threads share
            for name, stack in stacks.items():
                setattr(graph, name, stack.copy())
            graph._control_dependencies_stack, graph._variable_creator_stack = control[:], creators[:]
            graph._name_stack = names
            with tf.compat.v1.variable_scope(scope):
                yield

    return inherited


@contextlib.contextmanager
def op_attributes(mine: dict) -> Iterator[None]:
    """Gives ops of the default graph these attributes within this block, as tf.xla.experimental.jit_scope does, and no
    others: a graph has one set for all threads. What blocks in it leave is in `mine` afterwards."""
    graph = tf.compat.v1.get_default_graph()
    before = graph._attr_scope_map
    graph._attr_scope_map = mine
    try:
        yield
    finally:
        graph._attr_scope_map = before


def current_op_attributes() -> dict:
    """Returns the attributes that ops of the default graph get now."""
    return dict(tf.compat.v1.get_default_graph()._attr_scope_map)


def device_scopes() -> int:
    """Returns how many blocks of tf.device this place of the default graph is in."""
    return sum(1 for _ in tf.compat.v1.get_default_graph()._device_function_stack.peek_objs())


def control_flow():
    """Returns TensorFlow 1's branch or loop of the default graph in which ops are being made; None outside of any."""
    return tf.compat.v1.get_default_graph()._get_control_flow_context()


_replaced_here: contextvars.ContextVar[dict] = contextvars.ContextVar("replaced_here", default={})  # noqa: B039


@contextlib.contextmanager
def replaced_here(owner: Any, **replacements: Callable) -> Iterator[None]:
    """Replaces functions or properties of a class or module within this block, for this thread and its towers only.

    replacements: {name: (what was there before, as a function, and the arguments) -> the result}.
    """
    before, functions = _replaced_here.get(), {}
    for name, replacement in replacements.items():
        there = before.get((owner, name)) or _original(owner, name)
        functions[owner, name] = functools.update_wrapper(functools.partial(replacement, there), there)
    with holding(_replaced_here, before | functions):
        yield


@functools.cache
def _original(owner: Any, name: str) -> Callable:
    """Replaces an attribute for good by a lookup of the thread's replacement; returns the attribute."""
    original = getattr(owner, name)
    if isinstance(original, property):
        getter, setter = original.fget, original.fset
        setattr(owner, name, property(lambda self: _replaced_here.get().get((owner, name), getter)(self), setter))
        return getter

    @functools.wraps(original)
    def function(*args, **kwargs):
        return _replaced_here.get().get((owner, name), original)(*args, **kwargs)

    setattr(owner, name, function)
    return original


def tracing_not_counted() -> contextlib.AbstractContextManager:
    """Lets functions be traced within this block without being counted for TensorFlow's warning of retracing."""
    return replaced_here(polymorphic_function._FrequentTracingDetectorManager, called_with_tracing=lambda *_: None)


def wrap_method(base: type, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Puts wrap(method) in the place of a method of a class and, where they have their own, of all its
    subclasses, also of those that programs define later."""

    wrapped = set()

    def wrap_own(cls: type) -> None:
        if name in vars(cls) and cls not in wrapped:
            wrapped.add(cls)
            setattr(cls, name, wrap(vars(cls)[name]))
        for heir in cls.__subclasses__():
            wrap_own(heir)

    def begin(cls, **kwargs) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        wrap_own(cls)

    wrap_own(base)
    base.__init_subclass__ = classmethod(begin)


@contextlib.contextmanager
def _without_global(name: str) -> Iterator[None]:
    """Lets a global attribute of Keras be None in this thread within this block."""
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


@contextlib.contextmanager
def assigning_nothing() -> Iterator[None]:
    """Makes all that assigns to variables of TensorFlow read them instead, in this thread within a block."""

    def read(assign, variable, *args, **kwargs):
        return tf.no_op() if variable.dtype == tf.resource else tf.identity(variable)

    with contextlib.ExitStack() as stack:
        for module in (gen_resource_variable_ops, gen_state_ops):
            names = filter(re.compile(r"(resource_)?(assign|scatter|count_up_to)(?!.*eager)").match, dir(module))
            stack.enter_context(replaced_here(module, **dict.fromkeys(names, read)))
        yield


def collections_without(prefix: str):
    """Lets programs ask for what is in collections by scopes without a prefix, in this thread within a block."""

    def found(get_collection, graph, name, scope=None):
        def fits(item) -> bool:
            names = (item.name, item.name.removeprefix(prefix)) if hasattr(item, "name") else ()
            return any(re.match(scope, each) for each in names)

        return [item for item in get_collection(graph, name) if scope is None or fits(item)]

    return replaced_here(tf.Graph, get_collection=found)


def fresh_layer_names():
    """Numbers Keras layers without names from 0 on, in this thread within a block."""
    return _without_global(_LAYER_COUNTS)


def intercepted_assignments(assign: Callable[[Callable, keras.Variable, Any], None]):
    """Assigns to Keras variables by assign(original, variable, value); a context manager."""
    return replaced_here(keras.Variable, _direct_assign=assign)


# AutoGraph is for a program's functions: ours, which these call, took seconds to convert.
conversions.CONVERSION_RULES = (conversions.DoNotConvert("tower_train"), *conversions.CONVERSION_RULES)

Assigns = Callable[[Callable[[], Any], tf.Variable, Callable[[], Any]], Any]


@contextlib.contextmanager
def intercepted_by(assign: Assigns) -> Iterator[None]:
    """Assigns to TensorFlow's variables by assign(function that does it, variable, () -> the new value)."""

    def by(operation: Callable[[tf.Variable, Any], Any]) -> Callable:
        def call(original, variable, value, *args, **kwargs):
            does = functools.partial(original, variable, value, *args, **kwargs)
            return assign(does, variable, functools.partial(operation, variable, value))

        return call

    new = {"assign": by(lambda _, value: value), "assign_add": by(operator.add), "assign_sub": by(operator.sub)}
    classes = resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable
    with replaced_here(classes[0], **new), replaced_here(classes[1], **new):
        yield


def functions_inlined():
    """Makes what a program's tf.functions do a part of the graph that calls them, in this thread within a block; else
    the trace of a first call serves later ones, such as those of other towers."""

    def call(original, function, *args, **kwargs):
        plain = function.python_function
        if tf.executing_eagerly() or (getattr(plain, "__module__", None) or "").startswith(("keras.", "tensorflow.")):
            return original(function, *args, **kwargs)
        if not function._autograph:
            return plain(*args, **kwargs)
        options = converter.ConversionOptions(recursive=True, user_requested=True)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, options):
            return autograph.converted_call(tf_decorator.unwrap(plain)[1], args, kwargs, options=options)

    return replaced_here(type(tf.function(len)), __call__=call)


def move(variable: keras.Variable, device: str) -> None:
    """Moves the storage of a Keras variable to a device, unless it is there."""
    before, wanted = variable._value, tf.DeviceSpec.from_string(device)
    there = tf.DeviceSpec.from_string(before.device)
    if (there.device_type, there.device_index) == (wanted.device_type, wanted.device_index):
        return
    with tf.device(device):
        variable._initialize(before.numpy())
    variable._value._unique_id = before._unique_id  # by which optimizers know it


def updates_densely(optimizer: BaseOptimizer, grads: Sequence) -> bool:
    """Returns whether an optimizer of Keras' own updates without branches and whole variables."""
    has_branches = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or (
        optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency
    )
    is_known = type(optimizer).__module__.startswith("keras.src.")
    return is_known and not has_branches and not any(isinstance(grad, tf.IndexedSlices) for grad in grads)


@contextlib.contextmanager
def assigning_last() -> Iterator[None]:
    """Assigns to variables at the end of this block of a graph, what they are assigned in it; reads in it give the new
    values. So XLA can compile the block as one program, which reads all variables before it assigns any."""
    values: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}  # {id of a variable's handle: (handle, value)}

    def assign(_, handle, value, **unused):
        values[id(handle)] = handle, value
        return values[id(handle)][1].op

    def read(original, handle, dtype, **unused):
        return values[id(handle)][1] if id(handle) in values else original(handle, dtype)

    def assign_add(_, handle, value, **unused):
        return assign(_, handle, gen_resource_variable_ops.read_variable_op(handle, value.dtype) + value)

    def assign_sub(_, handle, value, **unused):
        return assign(_, handle, gen_resource_variable_ops.read_variable_op(handle, value.dtype) - value)

    with replaced_here(
        gen_resource_variable_ops,
        read_variable_op=read,
        assign_variable_op=assign,
        assign_add_variable_op=assign_add,
        assign_sub_variable_op=assign_sub,
    ):
        yield
    for handle, value in values.values():
        gen_resource_variable_ops.assign_variable_op(handle, value)


@contextlib.contextmanager
def functions_run_by(change: Callable[[tf.compat.v1.ConfigProto], None]) -> Iterator[None]:
    """Runs this thread's tf.functions within this block by the process's configuration, with a change."""
    process = context.context()
    before, config = process.function_call_options, tf.compat.v1.ConfigProto()
    config.ParseFromString(before.config_proto_serialized)
    change(config)
    process.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        process.function_call_options = before


def without_all_reduce():
    """Lets Keras' optimizers take gradients as they are within this block, of one replica of tf.distribute: its sum
    passes all through one operation, so on one device; a context manager."""
    return replaced_here(TFOptimizer, _all_reduce_sum_gradients=lambda _, optimizer, grads_and_vars: grads_and_vars)


def assign_here(variable: keras.Variable, value) -> None:
    """Assigns to a Keras variable whatever the scope."""
    gen_resource_variable_ops.assign_variable_op(variable._value.handle, tf.convert_to_tensor(value, variable.dtype))


def outside_of_stateless_scope():
    """Lets Keras assign to variables themselves within a block."""
    return _without_global("stateless_scope")


def is_seed_state(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a layer's random numbers, such as those of dropout."""
    return variable.name == "seed_generator_state"


def eager_attributes(layer: keras.Layer) -> dict[str, Callable]:
    """Returns {attribute: function that makes it in a graph} of a layer's tables and eager tensors, which no graph can
    use; to be called eagerly."""

    def table(keys, values, key_dtype, value_dtype):
        initializer = tf.lookup.KeyValueTensorInitializer(keys, values, key_dtype, value_dtype)
        return tf.lookup.StaticHashTable(initializer, layer._default_value)

    made = {}
    for name, value in vars(layer).items():
        if isinstance(value, tf.lookup.StaticHashTable):
            keys, values = (part.numpy() for part in value.export())
            made[name] = functools.partial(table, keys, values, value.key_dtype, value.value_dtype)
        elif isinstance(value, tf.__internal__.EagerTensor):
            made[name] = functools.partial(tf.constant, value.numpy(), value.dtype)
    return made


def moments_of_graph(values: Callable[[keras.Variable], tf.Tensor]) -> contextlib.AbstractContextManager:
    """Gives Normalization layers in this thread the graph's moments for eager ones, which no graph can use.

    values: an adapted layer's adapt_mean or adapt_variance -> its value in the graph.
    """

    def moment(convert, layer, weight):
        if layer.input_mean is not None:  # given when the layer was made
            return tf.constant(weight.numpy())
        adapted = layer.adapt_mean if weight is layer.mean else layer.adapt_variance
        return tf.cast(tf.reshape(values(adapted), weight.shape), weight.dtype)

    return replaced_here(keras.layers.Normalization, convert_weight=moment)


def take_constants(model: keras.Model) -> None:
    """Makes numpy arrays of the eager tensors that calls in functional models were given, which no graph can use; in
    the models themselves."""

    def as_numpy(value):
        return value.numpy() if isinstance(value, tf.__internal__.EagerTensor) else value

    for each in (model, *sublayers(model)):
        for operation in each.operations if isinstance(each, keras.Function) else ():
            for node in operation._inbound_nodes:
                made = node.arguments
                made.args, made.kwargs = keras.tree.map_structure(as_numpy, (made.args, made.kwargs))


def batches(x, y, sample_weight, size: int) -> Iterator[tuple]:
    """Yields batches of eager tensors, each with the data set's element_spec, from whatever `fit` takes; arrays in
    batches of a size."""
    adapter = data_adapters.get_data_adapter(x, y, sample_weight, batch_size=size)
    with eager_mode():
        adapter.on_epoch_begin()
        try:
            dataset = not_tuned(adapter.get_tf_dataset())
            yield from ((batch, dataset.element_spec) for batch in dataset)
        finally:
            adapter.on_epoch_end()


def as_dataset(batches: Sequence, spec) -> tf.data.Dataset:
    """Returns a data set of these batches with this element_spec, for which no function is traced anew."""
    variants = [tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch)) for batch in batches]
    datasets = [tf.data.experimental.from_variant(variant, spec) for variant in variants]
    return not_tuned(functools.reduce(tf.data.Dataset.concatenate, datasets))


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Puts the states of the random numbers of Python, numpy, TensorFlow's operations and Keras' draws without a seed
    back after this block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    ops_state = getattr(context.context(), "_rng", None)
    ops_state = ops_state and (ops_state, ops_state.getstate())
    drawn = global_state.get_global_attribute(_SEED_GENERATOR)
    drawn = drawn and (drawn.state, drawn.state.numpy())
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if ops_state:
            ops_state[0].setstate(ops_state[1])
        if drawn:
            drawn[0].assign(drawn[1])
        elif global_state.get_global_attribute(_SEED_GENERATOR):  # made since, of a seed that Python drew
            global_state.set_global_attribute(_SEED_GENERATOR, None)
            with eager_mode():  # within a tower it would get no value
                seed_generator.global_seed_generator()


def train_on(model: keras.Model, batch, spec) -> dict:
    """Does a step of `fit` on a batch of a data set of this element_spec and returns its report; train_on_batch would
    make a triple of it."""
    model.make_train_function()
    return model.train_function(iter(as_dataset([batch], spec)))


def skip_draws(count: int) -> None:
    """Numbers the default graph's next draws without a seed as if there had been so many draws before them."""
    numbers, graph = seeds_of_ops._graph_to_seed_dict, tf.compat.v1.get_default_graph()
    numbers[graph] = numbers.get(graph, 0) + count


@contextlib.contextmanager
def gradients_by(take: Callable[[Callable, Sequence, Sequence, bool], list]) -> Iterator[None]:
    """Lets take(compute, targets, sources, whether gradients may be differentiated) return the gradients of
    tf.gradients, GradientTape.gradient and compute_gradients in this thread within this block.

    compute(None, or over targets a scalar by which their gradients are multiplied) returns the gradients of sources.
    """

    def of_tape(gradient, tape, target, sources, output_gradients=None, *args, **kwargs):
        targets = tf.nest.flatten(target)

        def compute(factors):
            seeds = output_gradients
            if factors:
                given = list(map(tf.ones_like, targets)) if seeds is None else tf.nest.flatten(seeds)
                seeds = list(map(operator.mul, factors, given))
            return tf.nest.flatten(gradient(tape, target, sources, seeds, *args, **kwargs))

        grads = take(compute, targets, tf.nest.flatten(sources), record.could_possibly_record())
        return tf.nest.pack_sequence_as(sources, grads)

    def of_graph(gradients, ys, xs, *args, **kwargs):
        targets, sources = (each if isinstance(each, (list, tuple)) else [each] for each in (ys, xs))

        def compute(factors):
            return gradients(list(map(operator.mul, factors, targets)) if factors else ys, xs, *args, **kwargs)

        return take(compute, targets, sources, True)

    def of_optimizer(compute_gradients, optimizer, loss, var_list=None, *args, **kwargs):
        if callable(loss):  # by a tape
            return compute_gradients(optimizer, loss, var_list, *args, **kwargs)
        variables = tf.compat.v1.trainable_variables() if var_list is None else tf.nest.flatten(var_list)

        def compute(factors):
            pairs = compute_gradients(optimizer, factors[0] * loss if factors else loss, variables, *args, **kwargs)
            return [grad for grad, _ in pairs]

        return list(zip(take(compute, [loss], variables, True), variables, strict=True))

    with (
        replaced_here(tf.GradientTape, gradient=of_tape),
        replaced_here(gradients_util, _GradientsHelper=of_graph),
        replaced_here(tf.compat.v1.train.Optimizer, compute_gradients=of_optimizer),  # which asks for handles
    ):
        yield


class NoSeed(int):
    """The second seed of a draw of tf.random without a seed, see drawn_by."""


@contextlib.contextmanager
def drawn_by(draw: Callable[[Callable, dict[str, Any]], Any]) -> Iterator[None]:
    """Lets draw(function, its arguments by name) draw within this block for functions of keras.random and tf.random;
    `seed2`, which tf.random gives, is a NoSeed if the program gives no seed."""

    def drawn(function, *args, **kwargs):
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        return draw(function, given.arguments)

    def seeds(get_seed, op_seed):
        first, second = get_seed(op_seed)
        return first, second if op_seed is not None or second is None else NoSeed(second)

    with (
        replaced_here(seeds_of_ops, get_seed=seeds),
        replaced_here(backend_random, **dict.fromkeys(_DRAWS_OF_KERAS, drawn)),
        replaced_here(gen_random_ops, **dict.fromkeys(_DRAWS_OF_TENSORFLOW, drawn)),
    ):
        yield


_FLOATX_HERE: contextvars.ContextVar[str | None] = contextvars.ContextVar("floatx", default=None)
floatx_here = _FLOATX_HERE.get  # () -> the dtype of the `floatx` around this; None outside of one


def _floatx() -> str:
    return _FLOATX_HERE.get() or _FLOATX  # noqa: F821 - names of Keras' module


def let_threads_have_floatx(config: types.ModuleType) -> None:
    """Lets `floatx` set the default of the Keras to which this configuration belongs."""
    # Keras' modules have the function itself, so its code looks for a thread's dtype first.
    vars(config)["_FLOATX_HERE"] = _FLOATX_HERE
    config.floatx.__code__ = _floatx.__code__


let_threads_have_floatx(backend_config)


def let_float32_be_floatx(policy: type) -> None:
    """Lets `floatx` replace the float32 of Keras 2's layers that are made anew from their configuration: its policies
    are of this class."""
    init = policy.__init__
    policy.__init__ = lambda self, name: init(self, (name == "float32" and floatx_here()) or name)


@contextlib.contextmanager
def floatx(dtype: str) -> Iterator[None]:
    """Makes a dtype Keras' default, also of Python's numbers, for this thread and its towers within this block."""

    def converted(convert, x, dtype=None, **kwargs):  # image layers would take them as float32
        return convert(x, keras.config.floatx() if dtype is None and isinstance(x, float) else dtype, **kwargs)

    with holding(_FLOATX_HERE, dtype), replaced_here(backend_tensorflow, convert_to_tensor=converted):
        yield


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """Lets `compile` of models do nothing within this block, in which variables get no values, those of optimizers too;
    nor is what a loaded model was compiled with."""
    nothing = lambda original, *args, **kwargs: None  # noqa: E731

    def outside(make, *args, **kwargs):
        with outside_of_stateless_scope():
            return make(*args, **kwargs)

    with (
        replaced_here(trainer.Trainer, compile=nothing, compile_from_config=nothing),
        replaced_here(BaseOptimizer, __init__=outside),
        replaced_here(keras.optimizers.LossScaleOptimizer, __init__=outside),
    ):
        yield


def save_as(cls: type, name: str, may_save: Callable[[Any], bool]) -> None:
    """Lets Keras and TensorFlow save, copy and load models of a class as the plain model in their attribute `name`;
    save nothing where may_save(model) is false."""

    def on_plain_tensors(function):
        @functools.wraps(function)
        def call(model, *args, **kwargs):
            if not isinstance(model, cls):
                return function(model, *args, **kwargs)
            if function.__name__.startswith("save") and not may_save(model):
                return None
            return function(getattr(model, name), *args, **kwargs)

        return call

    def tracking(method):
        def call(self, *args, **kwargs):
            has_plain = name in vars(self)  # not yet while it is being made
            return getattr(vars(self)[name] if has_plain else super(cls, self), method)(*args, **kwargs)

        return call

    for module, functions in (
        (saving_lib, ("save_model", "save_weights_only", "load_weights_only", "serialize_keras_object")),
        (legacy_h5_format, ("save_model_to_hdf5",)),
        (serialization_lib, ("serialize_keras_object",)),
    ):
        for function in functions:
            setattr(module, function, on_plain_tensors(getattr(module, function)))
    for method in ("__reduce__", "_trackable_children", "_lookup_dependency"):
        setattr(cls, method, tracking(method))


def save_weights_as_hdf5(model: keras.Model, path, overwrite: bool = True) -> None:
    """Saves weights as Keras 2 did, except under the names by which Keras 3 knows its files."""
    if str(path).endswith(".weights.h5"):
        return saving_lib.save_weights_only(model, path)
    with h5py.File(path, "w" if overwrite else "x") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)


def give_callbacks(change: Callable[[dict], dict], uses_keras_3: bool) -> None:
    """Lets callbacks of Keras 3, or else of Keras 2, get change(logs) from now on."""
    if uses_keras_3:
        as_numbers = python_utils.pythonify_logs
        python_utils.pythonify_logs = lambda logs: change(as_numbers(logs))
    else:
        from tf_keras.callbacks import CallbackList

        given = CallbackList._process_logs
        CallbackList._process_logs = lambda *args, **kwargs: change(given(*args, **kwargs))


def compiled(model: keras.Model) -> list:
    """Returns what `compile` gave a model, other objects for each call."""
    return [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")]


@contextlib.contextmanager
def in_float64(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Makes float64 the default, and lets variables have their values, and all layers and losses compute, in it within
    this block; after it the variables have their values of before."""
    policy, float64 = keras.DTypePolicy("float64"), lambda _, owner: "float64"
    of_input = lambda dtype, its: "float64" if "float" in dtype(its) else dtype(its)  # noqa: E731
    of_layers = {"compute_dtype": float64, "variable_dtype": float64, "dtype_policy": lambda _, layer: policy}
    with (
        floatx("float64"),
        replaced_here(keras.Layer, **of_layers),
        replaced_here(keras.losses.Loss, dtype=float64),
        replaced_here(keras.KerasTensor, dtype=of_input),  # to which a model within a model casts
        replaced_here(keras.layers.InputLayer, dtype=of_input),
        contextlib.ExitStack() as stack,
    ):
        for variable in variables:
            if isinstance(variable, keras.Variable) and tf.as_dtype(variable.dtype).is_floating:
                with tf.device(variable._value.device):
                    value = tf.Variable(variable.numpy(), dtype=tf.float64)
                value._unique_id = variable._value._unique_id  # by which optimizers know it
                stack.enter_context(replaced(variable, "_value", value))
                stack.enter_context(replaced(variable, "_dtype", "float64"))
        yield


def attached(tensor) -> dict[str, tf.Tensor]:
    """Returns what Keras attached to a layer's output for layers and losses: its mask, and the logits of a softmax or a
    sigmoid, of which crossentropies are computed."""
    marks = {name: getattr(tensor, name, None) for name in ("_keras_mask", "_keras_logits")}
    return {name: value for name, value in marks.items() if value is not None}


def attach(tensor, values: dict[str, tf.Tensor]) -> None:
    """Attaches such tensors to another."""
    for name, value in values.items():
        setattr(tensor, name, value)


def take_losses(model: keras.Model, kept: dict[int, set]) -> None:
    """Makes layers know the losses that they added since an earlier call with this `kept`, and no others.

    Keras forgets a call's losses at the next call of the model, such as that of another tower.
    """
    for layer in model._flatten_layers():
        object.__setattr__(layer, "_loss_ids", kept.setdefault(id(layer), set()))


def compute_loss(model: keras.Model, x, y, y_pred, sample_weight, training: bool) -> tf.Tensor:
    """Computes the loss as `fit` does, by a compute_loss of the model's own, with or without an argument `training`."""
    return model._compute_loss(x, y, y_pred, sample_weight, training)


def is_overridden(model: keras.Model, name: str) -> bool:
    """Returns whether a program defines one of keras.Model's methods anew."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def check_restored_shapes() -> None:
    """Makes savers in graphs refuse, as TensorFlow 1 did, a checkpoint's value of another shape than the variable's."""
    restore = saveable_object_util.ResourceVariableSaveable.restore

    def checked(self, restored_tensors, restored_shapes):
        if restored_shapes is None and not tf.executing_eagerly():
            restored_tensors = [tf.ensure_shape(restored_tensors[0], self._var_shape)]
        return restore(self, restored_tensors, restored_shapes)

    saveable_object_util.ResourceVariableSaveable.restore = checked


def set_input(op: tf.Operation, index: int, value: tf.Tensor) -> None:
    """Gives an existing op of a graph another input."""
    op._update_input(index, value)


def keep_queues_on_host() -> None:
    """Places queues and readers on the CPU whatever tf.device says, as TensorFlow 1 did; today it refuses the graph."""
    apply, host_ops = ops.Graph._apply_device_functions, re.compile(r"Queue|Reader(?!Dataset)|Barrier")

    def apply_and_correct(graph, op):
        apply(graph, op)
        spec = tf.DeviceSpec.from_string(op.device) if host_ops.search(op.type) else None
        if spec and spec.device_type:  # CPU too: a queue in /gpu:1 asks for /cpu:1
            op._set_device(spec.replace(device_type="CPU", device_index=0).to_string())

    ops.Graph._apply_device_functions = apply_and_correct


def open_sessions_by(configure: Callable) -> None:
    """Opens all sessions from now on with what configure(target, graph, config) -> (target, config) makes of theirs."""
    initialize = session.BaseSession.__init__

    def opened(self, target="", graph=None, config=None):
        target, config = configure(target, graph or tf.compat.v1.get_default_graph(), config)
        initialize(self, target, graph, config)

    session.BaseSession.__init__ = opened


def initialize_all_for_keras_2() -> None:
    """Lets Keras 2 initialise all variables of its graph, as the package keras did, not only those of layers."""
    from tf_keras.src import backend

    of_layers = backend._get_variables
    backend._get_variables = lambda graph=None: {*of_layers(graph), *tf.compat.v1.global_variables()}


def show_gpus(count: int) -> None:
    """Adds GPUs to the devices that programs ask TensorFlow for, where there is none."""
    listed = device_lib.list_local_devices

    def list_local_devices(session_config=None):
        made = [DeviceAttributes(name=f"/device:GPU:{i}", device_type="GPU") for i in range(count)]
        return listed(session_config) + (made if not tf.config.list_physical_devices("GPU") else [])

    device_lib.list_local_devices = list_local_devices


index_table_from_tensor = lookup_ops.index_table_from_tensor  # the table {text: its position in a tensor of texts}


def restore_names_for_slim() -> None:
    """Gives TensorFlow's modules the names that the package tf-slim, and tf.layers of TensorFlow 2.21, look for."""
    variable_scope.variable = tf.compat.v1.Variable
    moved = {ops: "IndexedSlices Tensor", array_ops: "stack unstack", control_flow_ops: "Assert case cond while_loop"}
    for module, names in moved.items():
        for name in names.split():
            if not hasattr(module, name):
                setattr(module, name, getattr(tf.compat.v1, name))
    for name in ("legacy_tf_layers", "legacy_tf_layers.normalization"):
        sys.modules[f"tf_keras.{name}"] = importlib.import_module(f"tf_keras.src.{name}")

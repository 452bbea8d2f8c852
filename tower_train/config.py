"""The options of the commands: name, type, default, help, bounds. No TensorFlow here."""

import dataclasses
import functools
import math

from tower_train import errors, options
from tower_train.files import check_folder
from tower_train.options import Options, as_text, option, rules

_towers = functools.partial(option, group=options.TOWERS)
_machines = functools.partial(option, group=options.MACHINES)
_data = functools.partial(option, group=options.DATA)
_training = functools.partial(option, group=options.TRAINING)
_rate = functools.partial(option, group=options.LEARNING_RATE)
_optimizer = functools.partial(option, group=options.OPTIMIZER)
_arithmetic = functools.partial(option, group=options.ARITHMETIC)
_run = functools.partial(option, group=options.RUN)
_faults = functools.partial(option, group=options.FAULTS)
_reports = functools.partial(option, group=options.REPORTS)

MOST_USED = (  # options of the trainer, which --help shows first
    "num_gpus workload recipe dataset data_dir train_dir batch_size max_steps epochs optimizer momentum learning_rate "
    "lr_schedule warmup_epochs dtype seed save_every_steps log_every_steps eval_every_steps eval_at_end"
).split()


@dataclasses.dataclass(frozen=True)
class CompilerOptions(Options):
    """The compiler of the towers."""

    jit_compile: str = _arithmetic(
        "auto",
        "compile towers by XLA, in training also the update: always, never, or auto: on GPUs, not on CPUs, "
        "where it is slower",
        allowed=("auto", "always", "never"),
        resume="note",
    )


@dataclasses.dataclass(frozen=True)
class DeviceOptions(CompilerOptions):
    """The devices that carry towers, and their compiler."""

    num_gpus: int | None = _towers(
        None,
        "number of towers; tower i lives on GPU i, or on logical CPU device i (as many as --gpus names, else 1)",
        allowed="at least 1 and at most 1024",
    )
    gpus: tuple[int, ...] | None = _towers(
        None, "indices of the GPUs that carry the towers, e.g. 0,2 (the first --num_gpus)", allowed="at least 0"
    )
    device: str = _towers("auto", "gpu, cpu, or auto: GPUs if there are any, else CPU", allowed=("auto", "gpu", "cpu"))
    log_device_placement: bool = _towers(False, "print the device of each operation")

    @property
    def num_towers(self) -> int:
        return self.num_gpus or (len(self.gpus) if self.gpus else 1)

    def check(self):
        super().check()
        if self.gpus and len(set(self.gpus)) != len(self.gpus):
            raise errors.ConfigError(f"--gpus={as_text(self.gpus)} names a GPU twice. Name each GPU once.")
        if self.gpus and self.num_gpus not in (None, len(self.gpus)):
            raise errors.ConfigError(
                f"--num_gpus={self.num_gpus} and --gpus={as_text(self.gpus)} ({len(self.gpus)} GPUs) disagree. "
                "Give one of them."
            )
        if self.gpus and self.device == "cpu":
            raise errors.ConfigError(
                f"--gpus={as_text(self.gpus)} and --device=cpu exclude each other. "
                "Use --num_gpus for towers on the CPU."
            )


@dataclasses.dataclass(frozen=True)
class Config(DeviceOptions):
    """All options of a training run. Defaults are those of the original cifar10_multi_gpu_train."""

    variable_update: str = _towers(
        "auto",
        "place of the variables: cpu (one copy for all towers), mirrored (a copy on each tower's device), or "
        "auto: mirrored for towers on GPUs, else cpu",
        allowed=("auto", "cpu", "mirrored"),
        resume="note",
    )
    all_reduce: str | None = _towers(
        None,
        "all-reduce of mirrored variables' gradients: collective (TensorFlow's ring), nccl (NVIDIA GPUs only), "
        "or add_n (on one device, then copied) (nccl between several GPUs, else collective)",
        allowed=("collective", "nccl", "add_n"),
        resume="note",
        needs=("variable_update", "auto", "mirrored"),
    )
    check_mirrors_every_steps: int = _towers(
        0, "steps between checks that all copies of the variables agree to the bit; 0: none", allowed="at least 0"
    )

    augment_on: str = _towers(
        "auto",
        "place where training examples are augmented: host, device (their tower's), or auto: the device if it "
        "is a GPU and the workload's augmentation is made for that",
        allowed=("auto", "host", "device"),
        resume="note",
    )

    worker_hosts: str | None = _machines(
        None,
        "host:port of each worker process, the chief first, e.g. a:2222,b:2222 (from TF_CONFIG or Slurm; else "
        "this process alone). Whoever reaches these ports can act as you",
    )
    task_index: int | None = _machines(None, "index of this process in --worker_hosts, from 0", allowed="at least 0")
    worker_timeout_secs: float = _machines(
        30.0, "seconds without a heartbeat after which a worker counts as missing", allowed="above 0"
    )
    start_timeout_secs: float = _machines(
        1800.0, "seconds to wait for all workers to start, e.g. while container images are pulled", allowed="above 0"
    )
    wait_for_workers: bool = _machines(
        False,
        "wait for a missing worker and go on from the last checkpoint when it is back, instead of leaving with "
        "status 138; only for python -m tower_train: programs that call train() must be started again",
        needs=("train_dir",),
    )
    elastic: str | None = _machines(
        None,
        "number of workers MIN:MAX, e.g. 2:4: when one is lost, go on from the last checkpoint with the others, "
        "and with more when one returns; a step keeps the examples of MAX workers; only for python -m tower_train: "
        "programs that call train() must be started again",
        needs=("train_dir",),
    )

    workload: str = _data("cifar10", "network and data, as an import path: MODULE or MODULE:NAME")
    dataset: str = _data(
        "auto", "name of one of the workload's data sets; cifar10 has auto, cifar10 (downloaded if missing), generated"
    )
    data_dir: str | None = _data(None, "directory of the data (~/.cache/tower_train)")
    validation_fraction: float = _data(
        0.0,
        "share of the training examples to set aside for validation",
        allowed="at least 0 and below 1",
        resume="same",
    )
    check_data: bool = _data(
        True,
        "before a new run, look at labels and 500 examples, warn of likely mistakes and draw TRAIN_DIR/examples.png",
    )

    batch_size: int | None = _training(
        None,
        "examples per tower; a step has this times the number of towers (128)",
        needs=("global_batch_size", None),
        allowed="at least 1 and at most 16777216",
    )
    global_batch_size: int | None = _training(
        None,
        "examples per step over all towers of all workers, instead of --batch_size",
        allowed="at least 1 and at most 16777216",
        needs=("batch_size", None),
    )
    max_steps: int | None = _training(
        None,
        "steps after which to stop, counted over all starts of the run; if it is another number on resuming, "
        "--lr_schedule=cosine, linear and points end there, so that the rate jumps (1000)",
        needs=("epochs", None),
        allowed="at least 1",
    )
    epochs: float | None = _training(
        None,
        "passes over the data after which to stop, instead of --max_steps, also on resuming",
        allowed="above 0",
        needs=("max_steps", None),
    )
    seed: int = _arithmetic(
        0, "seed of initial weights, order, augmentations and dropout", allowed="at least 0", resume="same"
    )
    optimizer: str = _optimizer(
        "sgd",
        "sgd, momentum, adam, adamw (adam with --weight_decay), or muon (momentum made orthogonal for matrices "
        "and filters)",
        allowed=("sgd", "momentum", "adam", "adamw", "muon"),
        resume="same",
    )
    weight_decay: float | None = _optimizer(
        None,
        "decoupled weight decay: each step first multiplies all weights, except biases and normalisations, by 1 "
        "- this times the learning rate; 0: none (0.004 with --optimizer=adamw, else 0)",
        allowed="at least 0",
    )
    momentum: float = _optimizer(
        0.9, "coefficient of the momentum", allowed="at least 0 and below 1", needs=("optimizer", "momentum", "muon")
    )
    nesterov: bool = _optimizer(False, "Nesterov's momentum", needs=("optimizer", "momentum", "muon"))
    muon_iterations: int = _optimizer(
        5, "Newton-Schulz iterations", allowed="at least 1 and at most 100", needs=("optimizer", "muon")
    )
    learning_rate: float = _rate(0.1, "initial learning rate", allowed="above 0")
    learning_rate_decay_factor: float = _rate(
        0.1, "factor of each decay; 1: no decay", allowed="above 0", needs=("lr_schedule", "exponential", "piecewise")
    )
    num_epochs_per_decay: float = _rate(
        350.0, "epochs between decays", allowed="above 0", needs=("lr_schedule", "exponential")
    )
    lr_schedule: str = _rate(
        "exponential",
        "exponential (staircase), piecewise, cosine or linear down to 0 at the last step, or points",
        allowed=("exponential", "piecewise", "cosine", "linear", "points"),
    )
    lr_boundaries: tuple[int, ...] | None = _rate(
        None, "epochs at which the rate decays, e.g. 82,123", allowed="above 0", needs=("lr_schedule", "piecewise")
    )
    lr_points: str | None = _rate(
        None,
        "points SHARE:FACTOR, linear between them; shares of the whole training from 0 to 1, e.g. 0:0.2,0.23:1,1:0.07",
        needs=("lr_schedule", "points"),
    )
    lr_scaling: str = _rate(
        "none",
        "factor for the global batch: linear (global batch / --lr_base_batch), sqrt (its root), or none",
        allowed=("none", "linear", "sqrt"),
    )
    lr_base_batch: int = _rate(
        128,
        "examples per step for which the learning rate is meant",
        allowed="at least 1",
        needs=("lr_scaling", "linear", "sqrt"),
    )
    warmup_epochs: float = _rate(
        0.0, "epochs in which the learning rate rises to its value, for large batches; 0: none", allowed="at least 0"
    )
    label_smoothing: float = _training(
        0.0,
        "share of each label that is spread over all classes; 0: none",
        allowed="at least 0 and below 1",
        resume="note",
    )
    keep_hardest: str | None = _training(
        None,
        "EPOCH:SHARE, e.g. 2:0.75: from this epoch on, each pass takes only that share of the examples, those whose "
        "losses were the greatest when they were last trained on; for other options, an epoch still has all examples",
        resume="same",
    )
    class_weight: str | None = _training(
        None,
        "weights of classes in the training's loss: balanced (examples / (classes * those of the class)), or "
        "CLASS:WEIGHT by number or name, e.g. 0:1,1:2.5 (1 each)",
        resume="note",
    )
    clip_gradients: float = _optimizer(0.0, "largest global norm of the gradients; 0: no limit", allowed="at least 0")
    accumulate_steps: int = _training(
        1,
        "batches per tower and step, one after the other (gradient accumulation)",
        allowed="at least 1 and at most 1024",
    )
    ema: float = _optimizer(
        0.9999,
        "decay per step of the exponential moving averages of the weights, which evaluation uses; 0: none",
        allowed="at least 0 and below 1",
    )
    batch_norm: str = _training(
        "global",
        "batch normalisation: global (over the global batch, as on one device), or tower (each tower by its own "
        "batch, as in published programs: results then depend on the number of towers)",
        allowed=("global", "tower"),
        resume="note",
    )
    allow_stateful_random: bool = _arithmetic(
        False,
        "allow operations with random states of their own, such as tf.nn.dropout: results then depend on the "
        "number of towers and on resuming",
        resume="note",
    )
    dtype: str = _arithmetic(
        "float32",
        "arithmetic: float32, float64, bfloat16 or float16 (both with float32 variables, float16 with a "
        "loss scale), or auto: bfloat16 if the CPU or every GPU used has fast instructions for it, else float16 if "
        "every GPU used is made for it, else float32",
        allowed=("float32", "float64", "bfloat16", "float16", "auto"),
        resume="same",
    )
    check_towers: str = _arithmetic(
        "auto",
        "before a new run, a few small steps on the host show that its towers train what one trains: never, a "
        "number of towers, or auto: as many as there are (at most 4, of 2 batches each), unless the workload comes "
        "with the trainer",
    )
    allow_differences: bool = _arithmetic(
        False, "train even if --check_towers finds a difference, which the log and run.json then show"
    )
    tensor_float_32: bool | None = _arithmetic(
        None,
        "let GPUs round the factors of float32 products to 10 bits, which is faster (TensorFlow's setting, which "
        "is on)",
        resume="note",
    )
    deterministic: bool = _arithmetic(
        False,
        "make results repeat to the bit, on GPUs by slower kernels; refused if an operation has none",
        resume="note",
    )

    train_dir: str | None = _run(
        None, "directory of the run; a run that is there is resumed (a new runs/WORKLOAD-TIME)"
    )
    override: bool = _run(False, "resume even if workload, data, seed, batch, optimizer or dtype differ")
    save_every_steps: int = _run(
        250, "steps between checkpoints; there is one at the end too; 0: only that", allowed="at least 0"
    )
    keep_checkpoints: int = _run(5, "number of newest checkpoints kept; 0: all", allowed="at least 0")
    keep_best: bool = _run(
        False,
        "keep the checkpoint with the best first metric of the workload in TRAIN_DIR/best",
        needs=("eval_every_steps",),
    )
    early_stopping_patience_epochs: float = _run(
        0.0,
        "epochs without a better first metric after which to stop; 0: never",
        allowed="at least 0",
        needs=("eval_every_steps",),
    )
    on_nonfinite: str = _faults(
        "stop",
        "after a step whose loss or gradients are not finite: stop, or skip its update, but stop at the tenth in a row",
        allowed=("stop", "skip"),
        resume="note",
    )
    stall_timeout_secs: float | None = _faults(
        None,
        "if no step ends for this many seconds, report what the run waits for; if that is another worker or an "
        "all-reduce, end the run --worker_timeout_secs later; 0: never (1800 with several workers or GPUs that "
        "average, else 0)",
        allowed="at least 0",
    )

    log_every_steps: int = _reports(
        10,
        "steps between log lines, with a record in metrics.jsonl each; the last step of a start has one too",
        allowed="at least 1",
    )
    summary_every_steps: int = _reports(
        100, "steps between histograms and images for TensorBoard; 0: none", allowed="at least 0"
    )
    profile_steps: tuple[int, ...] | None = _reports(
        None, "first and last step to profile, e.g. 10,20, for TensorBoard's profile plugin", allowed="at least 1"
    )
    eval_every_steps: int = _reports(
        0,
        "steps between evaluations on the validation examples, or else the test examples; 0: none",
        allowed="at least 0",
    )
    eval_at_end: bool = _reports(False, "evaluate after the last step too, also on the test examples")

    def check(self):
        super().check()
        check_folder(self.train_dir, f"--train_dir={self.train_dir}")
        rules.check_config(self)

    @property
    def num_workers(self) -> int:
        """The number of processes that train together, with --elastic at most."""
        return self.most_workers or (len(self.worker_hosts.split(",")) if self.worker_hosts else 1)

    @property
    def most_workers(self) -> int | None:
        """MAX of --elastic=MIN:MAX."""
        return rules.parse_elastic(self.elastic)[1] if self.elastic else None

    @property
    def decay(self) -> float:
        """The decoupled weight decay; adamw's is that of Keras unless another is given."""
        return (0.004 if self.optimizer == "adamw" else 0.0) if self.weight_decay is None else self.weight_decay

    @property
    def batches_per_step(self) -> int:
        """The number of batches per step, over all towers of all workers."""
        return self.accumulate_steps * self.num_towers * self.num_workers

    @property
    def tower_batch(self) -> int:
        """The number of examples per tower and batch."""
        return self.global_batch_size // self.batches_per_step if self.global_batch_size else self.batch_size or 128

    @property
    def global_batch(self) -> int:
        """The number of examples per step, over all towers of all workers."""
        return self.tower_batch * self.batches_per_step

    def is_saved(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step, also for an evaluation. The last step always has one."""
        return any(every and step % every == 0 for every in (self.save_every_steps, self.eval_every_steps))

    def last_step(self, num_examples: int) -> int:
        """Returns the step to stop after, given the size of an epoch in examples."""
        if self.epochs:
            return math.ceil(min(self.epochs * num_examples / self.global_batch, 2.0**62))
        return self.max_steps or 1000


@dataclasses.dataclass(frozen=True)
class RecipeOptions(Options):
    """Options of the trainer's command line that choose a Config."""

    recipe: str | None = _data(
        None,
        "name of one of the workload's recipes: a network and its options, which the command line may change; "
        "--workload=NAME --help lists them",
    )
    seeds: tuple[int, ...] | None = _arithmetic(
        None,
        "seeds, e.g. 0,1,2: trains with each in turn, in TRAIN_DIR/seed-0 and so on, and prints the mean, "
        "deviation and interval of the results",
        allowed="at least 0",
    )


@dataclasses.dataclass(frozen=True)
class RunDataOptions(Options):
    """The workload and the data of a run, where they are not its own."""

    workload: str | None = _data(None, "network and data, as an import path (the run's own)")
    dataset: str | None = _data(None, "name of one of the workload's data sets (the run's own)")
    data_dir: str | None = _data(None, "directory of the data (the run's own)")


@dataclasses.dataclass(frozen=True)
class RunOptions(RunDataOptions):
    """Options of the commands that use a run: its directory, and which weights to take."""

    train_dir: str | None = _run(None, "directory of the run (required)")
    raw: bool = _run(False, "use the weights themselves, not their moving averages")
    single_view: bool = _run(False, "look at each example once, even if the workload averages over several views of it")
    best: bool = _run(False, "use the best checkpoint of a run with --keep_best, not its newest")

    def check(self):
        super().check()
        if not self.train_dir:
            raise errors.ConfigError("--train_dir is missing. Give the directory of the run.")
        check_folder(self.train_dir, f"--train_dir={self.train_dir}")


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(DeviceOptions, RunOptions):
    """Options of `python -m tower_train.evaluate`."""

    split: str = _data(
        "auto",
        "examples to evaluate on: test, validation, train, or auto: test, else validation",
        allowed=("auto", "test", "validation", "train"),
    )
    watch: bool = _run(False, "evaluate each new checkpoint as it appears, until the run has ended")
    batch_size: int = _run(
        256, "examples per tower and step; the result does not depend on it", allowed="at least 1 and at most 16777216"
    )

    def check(self):
        super().check()
        if self.best and self.watch:
            raise errors.ConfigError("--best and --watch exclude each other: one checkpoint, or each new one.")


@dataclasses.dataclass(frozen=True)
class ExportOptions(RunOptions):
    """Options of `python -m tower_train.export`."""

    export_dir: str | None = _run(
        None, "directory of the SavedModel, which must be new (TRAIN_DIR/export), or of --keras' files"
    )
    overwrite: bool = _run(False, "replace the SavedModel, or --keras' files, in --export_dir")
    keras: bool = _run(
        False, "write a Keras network as model.keras and model.weights.h5, into --export_dir (TRAIN_DIR)"
    )
    probabilities: bool = _run(
        False, "end the model by a softmax, or a sigmoid of several classes at once", needs=("keras",)
    )
    versioned: bool = _run(
        False, "write to a new folder in --export_dir, numbered by the time, as TensorFlow Serving expects"
    )

    def check(self):
        super().check()
        check_folder(self.export_dir, f"--export_dir={self.export_dir}")
        if self.versioned and (self.overwrite or self.keras):
            other = "keras" if self.keras else "overwrite"
            raise errors.ConfigError(f"--{other} and --versioned exclude each other: a new version replaces none.")


@dataclasses.dataclass(frozen=True)
class PredictOptions(CompilerOptions, RunOptions):
    """Options of `python -m tower_train.predict`."""

    top: int = _run(3, "number of classes shown for each example", allowed="at least 1")

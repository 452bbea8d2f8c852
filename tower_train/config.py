"""Every option of the commands once: name, type, default, help, bounds. No TensorFlow here."""

import dataclasses
import math
import re

from tower_train import errors
from tower_train.options import DATA, MACHINES, REPORTS, RUN, TOWERS, TRAINING, Options, as_text, option, rules


def is_remote(path: str) -> bool:
    """Whether a path names a place in another system, such as gs://bucket/run."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path) is not None  # one slash: pathlib makes that of two


def check_folder(path: str | None, shown: str) -> None:
    """Raises ConfigError for a folder that is in no file system; `shown` is the folder as messages call it."""
    if path and is_remote(path):
        raise errors.ConfigError(
            f"{shown}: it must be a local or mounted folder, as files are locked and renamed in it. Mount that store, "
            "or give a local folder and copy it later."
        )


@dataclasses.dataclass(frozen=True)
class DeviceOptions(Options):
    """The devices that carry towers, and the threads that run them."""

    num_gpus: int | None = option(
        None, "towers; tower i lives on GPU i, or on logical CPU device i (1, or as many as --gpus names)",
        TOWERS, minimum=1, maximum=1024,
    )  # fmt: skip
    gpus: tuple[int, ...] | None = option(
        None, "which GPUs carry the towers, by index, e.g. 0,2 (the first --num_gpus)", TOWERS, minimum=0
    )
    device: str = option(
        "auto", "gpu, cpu, or auto: GPUs if there are any, else CPU", TOWERS, choices=("auto", "gpu", "cpu")
    )
    intra_op_threads: int = option(
        0, "threads one operation may use; 0: TensorFlow decides", TOWERS, minimum=0, maximum=4096
    )
    inter_op_threads: int = option(
        0, "operations run at the same time; 0: TensorFlow decides", TOWERS, minimum=0, maximum=4096
    )
    log_device_placement: bool = option(False, "print the device of every operation", TOWERS)

    @property
    def num_towers(self) -> int:
        return self.num_gpus or (len(self.gpus) if self.gpus else 1)

    def check(self):
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

    variable_update: str = option(
        "auto", "where the variables live: cpu, one copy for all towers; mirrored, one on each tower's device; auto: "
        "mirrored where several GPUs average faster than the CPU by the arithmetic of tower_train.plan, else cpu",
        TOWERS, choices=("auto", "cpu", "mirrored"), resume="note",
    )  # fmt: skip
    join_towers: bool = option(
        True, "compute towers of one CPU together, each operation once, on all their batches; else side by side, as on "
        "GPUs", TOWERS,
    )  # fmt: skip
    all_reduce: str | None = option(
        None, "how mirrored variables' gradients are averaged: collective (TensorFlow's ring), nccl (NVIDIA's GPUs "
        "only), or add_n (on one device, from where the others copy) (nccl between several, else collective)", TOWERS,
        choices=("collective", "nccl", "add_n"), resume="note", needs=("variable_update", "auto", "mirrored"),
    )  # fmt: skip
    all_reduce_dtype: str = option(
        "same", "what gradients are sent in: the same as theirs, or bfloat16, for half of the traffic", TOWERS,
        choices=("same", "bfloat16"), resume="note",
    )  # fmt: skip
    check_mirrors_every_steps: int = option(
        0, "steps between checks that all copies of the variables are the same to the bit; 0: none", TOWERS, minimum=0
    )

    distort_on: str = option(
        "auto", "where training examples are distorted: host, device (their tower's), or auto: the device of GPUs that "
        "have a kernel for each operation of it", TOWERS, choices=("auto", "host", "device"), resume="note",
    )  # fmt: skip

    worker_hosts: str | None = option(
        None, "host:port of every process that trains along, the chief's first, e.g. a:2222,b:2222 (as TF_CONFIG or "
        "Slurm says; else only this process)", MACHINES,
    )  # fmt: skip
    task_index: int | None = option(None, "which of --worker_hosts this process is, from 0", MACHINES, minimum=0)
    worker_timeout_secs: float = option(
        30.0, "seconds without a sign of life after which a worker is taken to be missing", MACHINES, above=0
    )
    start_timeout_secs: float = option(
        1800.0, "seconds to wait for workers that have not started yet, e.g. while images are pulled", MACHINES, above=0
    )
    wait_for_workers: bool = option(
        False, "wait for a missing worker, and go on from the last checkpoint when it is back, instead of leaving "
        "with status 138; for python -m tower_train, as a program that calls train() must be started again", MACHINES,
        needs=("train_dir",),
    )  # fmt: skip
    on_worker_change: str = option(
        "refuse", "what to do about a run on a tf.data data set that another number of workers has begun: refuse, or "
        "begin the data set's next_epoch, without the rest of the one under way", MACHINES,
        choices=("refuse", "next_epoch"),
    )  # fmt: skip

    workload: str = option("cifar10", "what is trained: an import path, module or module:NAME", DATA)
    dataset: str = option(
        "auto", "which of the workload's data sets; cifar10 knows auto, cifar10 (downloaded if missing), generated",
        DATA,
    )  # fmt: skip
    data_dir: str | None = option(None, "directory of the data (~/.cache/tower_train)", DATA)
    check_data: bool = option(
        True, "look at labels and 500 examples before a new run and warn of what is likely to be a mistake", DATA
    )

    batch_size: int | None = option(
        None,
        "examples a tower takes at a time; a step has this times all towers (128)",
        TRAINING,
        minimum=1,
        maximum=2**24,
    )
    global_batch_size: int | None = option(
        None, "examples a step over all towers of all workers, instead of --batch_size", TRAINING, minimum=1,
        maximum=2**24, instead_of=("batch_size", "how many examples a step has"),
    )  # fmt: skip
    max_steps: int | None = option(
        None, "stop after this many steps, counted over all starts (1000)", TRAINING, minimum=1
    )
    epochs: float | None = option(
        None, "stop after this many passes over the data, instead of --max_steps", TRAINING, above=0,
        instead_of=("max_steps", "when to stop"),
    )  # fmt: skip
    seed: int = option(0, "seed of initial weights, order, distortions and dropout", TRAINING, minimum=0, resume="same")
    optimizer: str = option(
        "sgd", "sgd, momentum, adam, lars (momentum with a rate for each layer, for very large batches), or muon "
        "(momentum made orthogonal for matrices and filters)", TRAINING,
        choices=("sgd", "momentum", "adam", "lars", "muon"), resume="same",
    )  # fmt: skip
    momentum: float = option(
        0.9, "coefficient of --optimizer=momentum, lars or muon", TRAINING, minimum=0, below=1, resume="note",
        needs=("optimizer", "momentum", "lars", "muon"),
    )  # fmt: skip
    nesterov: bool = option(
        False, "Nesterov's momentum, with --optimizer=momentum or muon", TRAINING, resume="note",
        needs=("optimizer", "momentum", "muon"),
    )  # fmt: skip
    muon_iterations: int = option(
        5, "Newton-Schulz iterations that make the momentum orthogonal", TRAINING, minimum=1, maximum=100,
        resume="note", needs=("optimizer", "muon"),
    )  # fmt: skip
    learning_rate: float = option(0.1, "initial learning rate", TRAINING, above=0, resume="note")
    learning_rate_decay_factor: float = option(
        0.1, "factor of each decay of the learning rate; 1: no decay", TRAINING, above=0, resume="note",
        needs=("lr_schedule", "exponential", "piecewise"),
    )  # fmt: skip
    num_epochs_per_decay: float = option(
        350.0, "epochs between decays (staircase)", TRAINING, above=0, resume="note",
        needs=("lr_schedule", "exponential"),
    )  # fmt: skip
    lr_schedule: str = option(
        "exponential", "exponential (staircase), piecewise, cosine or linear down to 0 at the last step, or points",
        TRAINING, choices=("exponential", "piecewise", "cosine", "linear", "points"), resume="note",
    )  # fmt: skip
    lr_boundaries: tuple[int, ...] | None = option(
        None, "epochs at which --lr_schedule=piecewise decays the learning rate, e.g. 82,123", TRAINING, above=0,
        resume="note", needs=("lr_schedule", "piecewise"),
    )  # fmt: skip
    lr_points: str | None = option(
        None, "what --lr_schedule=points multiplies the learning rate with at shares of the whole training, linear "
        "between them, e.g. 0:0.2,0.23:1,1:0.07", TRAINING, resume="note", needs=("lr_schedule", "points"),
    )  # fmt: skip
    lr_scaling: str = option(
        "none", "multiply the learning rate by global batch / --lr_base_batch (linear), its root (sqrt), or not (none)",
        TRAINING, choices=("none", "linear", "sqrt"), resume="note",
    )  # fmt: skip
    lr_base_batch: int = option(
        128, "the global batch that the learning rate is meant for, for --lr_scaling", TRAINING, minimum=1,
        resume="note", needs=("lr_scaling", "linear", "sqrt"),
    )  # fmt: skip
    warmup_epochs: float = option(
        0.0, "epochs in which the learning rate rises to its value, for large batches; 0: none", TRAINING, minimum=0,
        resume="note",
    )  # fmt: skip
    label_smoothing: float = option(
        0.0, "share of each label that is spread over all classes", TRAINING, minimum=0, below=1, resume="note"
    )
    clip_gradients: float = option(
        0.0, "greatest norm of all gradients together; 0: no limit", TRAINING, minimum=0, resume="note"
    )
    accumulate_steps: int = option(
        1, "batches that each tower takes one after the other for one step", TRAINING, minimum=1, maximum=1024
    )
    lookahead_every_steps: int = option(
        0, "steps between updates of slow weights, to which the weights are then set; 0: none", TRAINING, minimum=0,
        resume="note",
    )  # fmt: skip
    lookahead_decay: float = option(
        0.5, "share of the slow weights that such an update keeps", TRAINING, minimum=0, below=1, resume="note",
        needs=("lookahead_every_steps",),
    )  # fmt: skip
    lookahead_ramp: float = option(
        0.0, "multiply this share with the done share of the training to this power; 0: constant", TRAINING, minimum=0,
        resume="note", needs=("lookahead_every_steps",),
    )  # fmt: skip
    moving_average_decay: float = option(
        0.9999, "decay of the moving averages of the weights; 0: none", TRAINING, minimum=0, below=1, resume="note"
    )
    sync_batch_norm: bool = option(
        False, "batch normalisation over the global batch, not tower by tower", TRAINING, resume="note"
    )
    allow_stateful_random: bool = option(
        False, "train a network whose operations keep random states of their own, such as tf.nn.dropout's: N towers "
        "are not one with it, nor is a resumed run a whole one", TRAINING, resume="note",
    )  # fmt: skip
    dtype: str = option(
        "float32", "arithmetic in float32, float64, or on float32 variables in bfloat16, or in float16 with a loss "
        "scale; auto: bfloat16 if the processor, or every GPU used, has instructions for it, else float16 if every GPU "
        "used is made for that, else float32", TRAINING,
        choices=("float32", "float64", "bfloat16", "float16", "auto"), resume="same",
    )  # fmt: skip
    tensor_float_32: bool | None = option(
        None, "let GPUs round the factors of float32 products to 10 bits, which is faster (TensorFlow's setting, which "
        "is to do so)", TRAINING, resume="note",
    )  # fmt: skip
    deterministic: bool = option(
        False, "let GPUs compute what repeats to the bit, which is slower; refused where an operation cannot", TRAINING,
        resume="note",
    )  # fmt: skip

    train_dir: str | None = option(
        None, "directory of this run; one that holds a run is resumed (a new runs/WORKLOAD-TIME)", RUN
    )
    override: bool = option(False, "resume even where workload, data, seed, batch or optimizer differ", RUN)
    save_every_steps: int = option(
        250, "steps between checkpoints; also saved at the end; 0: only then", RUN, minimum=0
    )
    keep_checkpoints: int = option(5, "newest checkpoints kept; 0: all", RUN, minimum=0)
    keep_best: bool = option(
        False, "keep the checkpoint with the best evaluation by the workload's first metric, in TRAIN_DIR/best", RUN,
        needs=("eval_every_steps",),
    )  # fmt: skip
    stop_after_no_gain_epochs: float = option(
        0.0, "stop when the evaluations have not become better by that metric for this many epochs; 0: never", RUN,
        minimum=0, needs=("eval_every_steps",),
    )  # fmt: skip
    on_nonfinite: str = option(
        "stop", "what to do about a step whose loss or gradients are not finite: stop, or skip its update", RUN,
        choices=("stop", "skip"), resume="note",
    )  # fmt: skip
    max_nonfinite_in_a_row: int = option(
        10, "with --on_nonfinite=skip: as many such steps one after the other end the run", RUN, minimum=1,
        needs=("on_nonfinite", "skip"),
    )  # fmt: skip
    dump_bad_batch: bool = option(False, "write the batch of such a step to TRAIN_DIR/bad_batch-STEP.npz", RUN)
    stall_timeout_secs: float | None = option(
        None, "seconds without the end of a step after which to report what is waited for, and after "
        "--worker_timeout_secs more to leave where that is another worker or an averaging; 0: never (1800 where "
        "several workers or GPUs average, else 0)", RUN, minimum=0,
    )  # fmt: skip

    log_every_steps: int = option(10, "steps between log lines", REPORTS, minimum=1)
    summary_every_steps: int = option(
        100, "steps between histograms and images for TensorBoard; 0: none", REPORTS, minimum=0
    )
    profile_steps: tuple[int, ...] | None = option(
        None, "profile the steps from the one to the other, e.g. 10,20, for TensorBoard's profile plugin", REPORTS,
        minimum=1,
    )  # fmt: skip
    eval_every_steps: int = option(0, "steps between evaluations on the test examples; 0: none", REPORTS, minimum=0)
    eval_at_end: bool = option(False, "evaluate on the test examples after the last step", REPORTS)
    train_eval_examples: int = option(
        1000, "training examples that each of these evaluations also looks at, to compare; 0: none", REPORTS, minimum=0
    )

    def check(self):
        super().check()
        check_folder(self.train_dir, f"--train_dir={self.train_dir}")
        rules.check(self)

    @property
    def num_workers(self) -> int:
        """Processes that train together."""
        return len(self.worker_hosts.split(",")) if self.worker_hosts else 1

    @property
    def batches_per_step(self) -> int:
        """Batches of one step, over all towers of all workers."""
        return self.accumulate_steps * self.num_towers * self.num_workers

    @property
    def tower_batch(self) -> int:
        """Examples that a tower takes at a time."""
        return self.global_batch_size // self.batches_per_step if self.global_batch_size else self.batch_size or 128

    @property
    def global_batch(self) -> int:
        """Examples a step, over all towers of all workers."""
        return self.tower_batch * self.batches_per_step

    def is_saved(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, be it for an evaluation; there is one after the last step too."""
        return any(every and step % every == 0 for every in (self.save_every_steps, self.eval_every_steps))

    def last_step(self, num_examples: int) -> int:
        """The step to stop at, given the size of one epoch."""
        if self.epochs:
            return math.ceil(min(self.epochs * num_examples / self.global_batch, 2.0**62))
        return self.max_steps or 1000


@dataclasses.dataclass(frozen=True)
class RecipeOptions(Options):
    """The options of the trainer's command line that choose a Config."""

    recipe: str | None = option(
        None, "one of the workload's recipes: a network and all options that suit it, unless the command line gives "
        "others; --workload=NAME --help lists them", DATA,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunOptions(Options):
    """The run that a command is about, and which of its weights to take."""

    train_dir: str | None = option(None, "directory of the run (required)", RUN)
    raw: bool = option(False, "take the weights themselves, not their moving averages", RUN)
    single_view: bool = option(
        False, "look at each example once, also if the workload averages over several views of it", RUN
    )
    best: bool = option(False, "take the best checkpoint of a run with --keep_best, not its newest", RUN)
    workload: str | None = option(None, "import path of the workload (the run's own)", DATA)
    dataset: str | None = option(None, "which of the workload's data sets (the run's own)", DATA)
    data_dir: str | None = option(None, "directory of the data (the run's own)", DATA)

    def check(self):
        super().check()
        if not self.train_dir:
            raise errors.ConfigError("--train_dir is missing. Give the directory of the run.")
        check_folder(self.train_dir, f"--train_dir={self.train_dir}")


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(RunOptions, DeviceOptions):
    """Options of `python -m tower_train.evaluate`."""

    watch: bool = option(False, "evaluate each new checkpoint as it appears, until the run has ended", RUN)
    watch_secs: float = option(
        5.0, "seconds between looks for a new checkpoint with --watch", RUN, above=0, needs=("watch",)
    )
    batch_size: int = option(
        256, "examples per tower and step; the result does not depend on it", RUN, minimum=1, maximum=2**24
    )

    def check(self):
        super().check()
        if self.best and self.watch:
            raise errors.ConfigError("--best and --watch exclude each other: one checkpoint, or each new one.")


@dataclasses.dataclass(frozen=True)
class ExportOptions(RunOptions):
    """Options of `python -m tower_train.export`."""

    export_dir: str | None = option(None, "directory of the SavedModel, which must be new (TRAIN_DIR/export)", RUN)
    overwrite: bool = option(False, "replace the SavedModel that is there", RUN)
    versioned: bool = option(
        False, "write it into a new folder there, numbered by the time, as TensorFlow Serving expects versions", RUN
    )

    def check(self):
        super().check()
        check_folder(self.export_dir, f"--export_dir={self.export_dir}")
        if self.overwrite and self.versioned:
            raise errors.ConfigError("--overwrite and --versioned exclude each other: a new version replaces none.")


@dataclasses.dataclass(frozen=True)
class PredictOptions(RunOptions):
    """Options of `python -m tower_train.predict`."""

    top: int = option(3, "classes shown for each example", RUN, minimum=1)


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """Options of `python -m tower_train.plan`."""

    params: float = option(1.068298e6, "trained weights of the network", TRAINING, minimum=1)
    flops: float = option(
        105e6, "floating-point operations of a training example, forwards and backwards", TRAINING, minimum=1
    )
    batch_size: int = option(128, "examples per tower and step", TRAINING, minimum=1)
    towers: int = option(8, "towers that one machine holds", TOWERS, minimum=1)
    tower_flops: float = option(50e12, "operations a second that a tower reaches on this network", TOWERS, minimum=1)
    link: float = option(
        16e9, "bytes a second between a tower's device and the CPU or another device", TOWERS, minimum=1
    )
    launch: float = option(
        100e-6, "seconds until all devices of a machine have begun to average (taken, not measured)", TOWERS, minimum=0
    )
    host_memory: float = option(50e9, "bytes a second that a machine's CPU reads from its memory", TOWERS, minimum=1)
    all_reduce_dtype: str = option(
        "same", "what gradients are sent in: same (float32), or bfloat16", TOWERS, choices=("same", "bfloat16")
    )
    workers: int = option(128, "machines, at most", MACHINES, minimum=1)
    bandwidth: float = option(3e9, "bytes a second that a machine sends to another", MACHINES, minimum=1)
    latency: float = option(50e-6, "seconds until the first byte of a message is there", MACHINES, minimum=0)

"""The settings of a training run: records with a field for each key of the file, and what it says.

`docs/train.md` is the manual. The text of a field is also that of `nnscaler train --help`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Code = str | Callable[..., Any]  # a function or class: named in a file of settings, itself in Python


@dataclass(frozen=True)
class DataSettings:
    """The training data.

    source      `file.py::function` that returns the training data, or (training, validation); a dataset each
    batch_size  rows of a global batch
    shuffle     in an order of its own for each epoch; not for iterable datasets
    drop_last   leave out a last batch that is short
    workers     processes that read, for each rank
    packed      pack documents of tokens into rows of this length; 0: the dataset has rows
    collate     `file.py::function` of a list of rows that makes a batch of them, of each data part's; empty: stacked
    """

    source: str = ""
    batch_size: int = 32
    shuffle: bool = True
    drop_last: bool = False
    workers: int = 0
    packed: int = 0
    collate: Code = ""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer; every other key of its table is an argument of the class, such as lr.

    name       a class of torch.optim, or `file.py::Class`
    groups     pattern of names -> arguments of these parameters, the first that fits: "*.bias" = {weight_decay = 0.0}
    arguments  the other keys
    """

    name: Code = "AdamW"
    groups: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate over the steps; every other key of its table is an argument of the class.

    name       a class of torch.optim.lr_scheduler, or `file.py::function` of the optimizer; empty: the rate stays
    per        its unit: "step" or "epoch"
    arguments  the other keys; total_steps and T_max are the steps of the run where they are left out
    """

    name: Code = ""
    per: str = "step"
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrecisionSettings:
    """How numbers are held, with the meanings of FSDP2's MixedPrecisionPolicy. Parameters rest in the model's dtypes.

    param        dtype to which parameters are cast for forward and backward, such as "bfloat16"; empty: as they rest
    reduce       dtype in which gradients are summed over ranks; empty: float32, or the parameter's if that is wider
    output       dtype to which the model's floating outputs are cast; empty: as they are
    cast_inputs  cast floating inputs to `param`
    scale_loss   for float16: scale the loss by torch.amp.GradScaler's rule, and skip a step whose gradients overflow
    dtype        of every floating tensor, those at rest too: "float64", to compare runs; empty: the model's own
    """

    param: str = ""
    reduce: str = ""
    output: str = ""
    cast_inputs: bool = True
    scale_loss: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class SearchSettings:
    """For what a plan is searched, where `plan` is "auto".

    cluster      a description of the machine, or the name of a ready one; empty: this machine
    memory       of a rank, such as "80GB"; empty: what the cluster says
    constraints  file of what the plan has to keep to
    profile      file of costs that `nnscaler profile` measured
    """

    cluster: str = ""
    memory: str = ""
    constraints: str = ""
    profile: str = ""


@dataclass(frozen=True)
class ValidationSettings:
    """The loss on data that is not trained on, with the model in evaluation mode.

    every       steps from one to the next, and at the end; 0: never
    batches     that are read each time, the first ones; 0: all
    batch_size  rows of a global batch; 0: as in training
    """

    every: int = 0
    batches: int = 0
    batch_size: int = 0


@dataclass(frozen=True)
class CheckpointSettings:
    """The checkpoints of the run, and where it goes on.

    folder        one folder a checkpoint in it, from the newest of which the run goes on; empty: none are written
    every         steps from one to the next, besides the last step; 0: only the last
    keep          newest ones that stay, besides the best; 0: all
    asynchronous  write while training goes on
    best          "min" or "max": which validation loss is best
    """

    folder: str = ""
    every: int = 0
    keep: int = 3
    asynchronous: bool = False
    best: str = "min"


@dataclass(frozen=True)
class LoggerSettings:
    """Who is told of losses.

    every        steps from one line of the console to the next; on a terminal they are one line that changes
    tensorboard  folder for TensorBoard; empty: none
    wandb        project of Weights & Biases; empty: none
    """

    every: int = 1
    tensorboard: str = ""
    wandb: str = ""


@dataclass(frozen=True)
class ProfilerSettings:
    """A trace of torch.profiler, one file for each rank.

    first, last  steps that are traced; 0: none
    folder       for the files, which chrome://tracing and Perfetto show
    """

    first: int = 0
    last: int = 0
    folder: str = "profile"


@dataclass(frozen=True)
class HookSettings:
    """Functions of yours, `file.py::function` each, called on every rank with the trainer.

    on_start       before the first step
    on_step        after each step: trainer.step, trainer.loss
    on_validation  after each validation: trainer.validation_loss
    on_checkpoint  after each checkpoint
    on_end         after the last step
    """

    on_start: tuple[Code, ...] = ()
    on_step: tuple[Code, ...] = ()
    on_validation: tuple[Code, ...] = ()
    on_checkpoint: tuple[Code, ...] = ()
    on_end: tuple[Code, ...] = ()


@dataclass(frozen=True)
class TrainSettings:
    """A run.

    model          `file.py`, `file.py::factory` or `package.module:factory`: build_model() -> nn.Module
    weights        that the model starts from: a folder or file of safetensors, or a checkpoint; empty: the model's own
    weights_prefix  what names in the model begin with and those in `weights` do not
    loss           `file.py::function` of outputs and batch, for a model that returns no loss
    plan           how the model lies on the ranks: dp=2,tp=2,zero=1; plan.json; policy.py::function; or auto
    ranks          processes, one a device; 0: as many as the plan says, or torchrun started
    micro_batches  pieces into which the program cuts a batch, exact also for losses over unequal counts; 0: the plan's
    pipeline       order of micro-batches: a name of `nnscaler list schedules`, or a file; empty: the plan's
    accumulation   batches whose gradients are averaged for one step of the optimizer
    clip           most that the norm of all gradients may be; 0: any
    steps          of the optimizer, in all; 0: as epochs say
    epochs         over the training data, where steps is 0
    seed           of the parameters, the order of the data and dropout
    device         auto, cpu or cuda
    compile        compile the forward of each stage with torch.compile
    check_replicas_every  steps between two checks that copies of a tensor are equal on all ranks, bit for bit; 0: never
    data, optimizer, schedule, precision, search, validation, checkpoints, loggers, profiler, hooks  tables
    """

    model: str = ""
    weights: str = ""
    weights_prefix: str = ""
    loss: Code = ""
    plan: str = ""
    ranks: int = 0
    micro_batches: int = 0
    pipeline: str = ""
    accumulation: int = 1
    clip: float = 0.0
    steps: int = 0
    epochs: int = 1
    seed: int = 0
    device: str = "auto"
    compile: bool = False
    check_replicas_every: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    loggers: LoggerSettings = field(default_factory=LoggerSettings)
    profiler: ProfilerSettings = field(default_factory=ProfilerSettings)
    hooks: HookSettings = field(default_factory=HookSettings)

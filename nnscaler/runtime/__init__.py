"""Run generated rank programs: what role modules import, and the executor that runs them. Imports torch only."""

from nnscaler.layout import Invariant, Partial, Replicated, Sharded
from nnscaler.runtime import ops
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.communicator import CommunicationError, Communicator, ProgramError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.user_operators import user_operators
from nnscaler.runtime.recompute_in_backward import recompute
from nnscaler.runtime.stage_base_class import (
    Buffer,
    Constant,
    Exchange,
    Input,
    Loss,
    Parameter,
    Receive,
    Result,
    Send,
    Stage,
)
from nnscaler.runtime.training.autocast_on_any_device import dtypes
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

__all__ = [
    "Buffer",
    "CommunicationError",
    "Communicator",
    "Constant",
    "Exchange",
    "ExecutorSettings",
    "Input",
    "Invariant",
    "Loss",
    "Parameter",
    "Partial",
    "ProgramError",
    "RankExecutor",
    "Receive",
    "Replicated",
    "Result",
    "Send",
    "Sharded",
    "Simulator",
    "Stage",
    "comm",
    "dtypes",
    "ops",
    "recompute",
    "user_operators",
]

"""Run generated rank programs: what role modules import, and the executor that runs them. Imports torch only."""

from nnscaler.runtime import comm, ops
from nnscaler.runtime.communicator import CommunicationError, Communicator, ProgramError
from nnscaler.runtime.executor import RankExecutor
from nnscaler.runtime.layout import Invariant, Partial, Replicated, Sharded
from nnscaler.runtime.precision import dtypes
from nnscaler.runtime.role import Buffer, Constant, Exchange, Input, Loss, Parameter, Receive, Send, Stage, recompute
from nnscaler.runtime.simulator import Simulator
from nnscaler.runtime.user_operators import user_operators

__all__ = [
    "Buffer",
    "CommunicationError",
    "Communicator",
    "Constant",
    "Exchange",
    "Input",
    "Invariant",
    "Loss",
    "Parameter",
    "Partial",
    "ProgramError",
    "RankExecutor",
    "Receive",
    "Replicated",
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

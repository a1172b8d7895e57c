"""The text of a role program as data, read without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from op_registry.expression import Expression

from nnscaler.ir.layout import State
from nnscaler.ir.operation import Region

ALIAS = "="  # the function of a line that only names a tensor anew
ITEM = "[]"  # the function of a line that takes one of the results of another: (variable, number)


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor in an argument: a local variable, or (`stored`) an attribute of the stage."""

    name: str
    stored: bool = False


class Mark(Enum):
    """Arguments that stand for the run, not for the model."""

    STAGE = "self"
    DEVICE = "self.device"


@dataclass(frozen=True, slots=True)
class OutsideGrammar:
    """A place of the text that is outside of the grammar of rank programs. `targets`: what it would have assigned."""

    line: int
    why: str
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One assignment.

    targets   variables, "_" for a dropped result: it is a variable like others
    hint      its comment, in which the writer states layouts; not trusted, only tried first among legal typings
    sequence  the result is unpacked: `a, b = ...`, `a, = ...`
    """

    number: int
    text: str
    targets: tuple[str, ...]
    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    region: Region = field(default_factory=Region)
    hint: str = ""
    sequence: bool = False  # the result is unpacked: `a, b = ...`, `a, = ...`

    @property
    def is_conversion(self) -> bool:
        return self.function.startswith("comm.")


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A nested function and its call, whose activations are computed again in backward. `bound`: (name inside, the
    variable given)."""

    number: int
    bound: tuple[tuple[str, Variable], ...]
    lines: tuple[Assignment | OutsideGrammar, ...]
    results: tuple[Variable, ...]
    targets: tuple[str, ...]


Statement = Assignment | Recomputed | OutsideGrammar


@dataclass(frozen=True, slots=True)
class Body:
    """`prepare` or `forward`."""

    number: int
    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    returned: Mapping[str, Variable]


@dataclass(frozen=True, slots=True)
class StoredText:
    """A declared parameter, buffer or constant. `states` are those at rest, by axis."""

    number: int
    kind: str  # "parameter" | "frozen" | "buffer" | "constant"
    variable: str
    fqn: str
    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, State]
    reduce: tuple[str, ...] = ()
    copies: tuple[tuple[int, ...], ...] = ()
    used: bool = True


@dataclass(frozen=True, slots=True)
class InputText:
    number: int
    variable: str
    name: str
    states: Mapping[str, State]


@dataclass(frozen=True, slots=True)
class MessageText:
    """A `Send` or a `Receive`: the other stage, and the rank there of each position here."""

    number: int
    key: str
    stage: int
    peers: tuple[int, ...]
    needs_grad: bool
    variable: str = ""  # of a Receive
    shape: tuple[int | Expression, ...] = ()
    dtype: str = ""


Piece = tuple[int, int, tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True, slots=True)
class ExchangeText:
    """One side of a transfer between meshes of different shape."""

    number: int
    key: str
    stage: int
    messages: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    shape: tuple[int | Expression, ...]
    dtype: str
    needs_grad: bool
    variable: str = ""  # of the receiving side


@dataclass(frozen=True)
class StageText:
    """One stage class. `loss` is None where the stage computes none."""

    file: str
    number: int
    index: int
    ranks: tuple[int, ...]
    axes: Mapping[str, int]
    micro_batches: int
    stored: tuple[StoredText, ...]
    inputs: tuple[InputText, ...]
    prepare_inputs: tuple[InputText, ...]
    receives: tuple[MessageText | ExchangeText, ...]
    sends: tuple[MessageText | ExchangeText, ...]
    loss: Mapping[str, State] | None
    updates: Mapping[str, str]
    prepare: Body | None
    forward: Body
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoleText:
    """One file. `user`: attribute of `user` -> registered name of the operator. `files`: where these come from."""

    file: str
    ranks: tuple[int, ...]
    schedule: tuple[str, ...]
    schedule_line: int
    stages: tuple[StageText, ...]
    user: Mapping[str, str]
    problems: tuple[OutsideGrammar, ...] = ()
    files: frozenset[str] = frozenset()

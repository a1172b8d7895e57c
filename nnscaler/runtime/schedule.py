"""The instruction list of one device: `F<stage>.<micro-batch>` and `B<stage>.<micro-batch>`, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.role import Stage

_INSTRUCTION = re.compile(r"([FB])(\d+)\.(\d+)$")


@dataclass(frozen=True, slots=True)
class Instruction:
    kind: str  # "F" or "B"
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


def parse_schedule(text: str, stages: Sequence[type[Stage]]) -> tuple[Instruction, ...]:
    """Read the instructions of `text`.

    Raises ProgramError for a word that is none, a stage or micro-batch that does not exist, one that runs twice or
    never, and a backward before its forward.
    """
    micro_batches = {stage.index: stage.micro_batches for stage in stages}
    instructions: list[Instruction] = []
    for word in text.split():
        match = _INSTRUCTION.match(word)
        if not match:
            raise ProgramError(f"SCHEDULE: {word!r} is not F<stage>.<micro-batch> or B<stage>.<micro-batch>")
        instruction = Instruction(match[1], int(match[2]), int(match[3]))
        if instruction.micro >= micro_batches.get(instruction.stage, 0):
            raise ProgramError(f"SCHEDULE: {word} names a stage or micro-batch that this role does not have")
        if instruction in instructions:
            raise ProgramError(f"SCHEDULE: {word} occurs twice")
        if instruction.kind == "B" and Instruction("F", instruction.stage, instruction.micro) not in instructions:
            raise ProgramError(f"SCHEDULE: {word} comes before its forward")
        instructions.append(instruction)
    for stage, count in micro_batches.items():
        for micro in range(count):
            if Instruction("F", stage, micro) not in instructions:
                raise ProgramError(f"SCHEDULE: F{stage}.{micro} is missing")
    return tuple(instructions)

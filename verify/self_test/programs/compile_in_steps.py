"""The compiler's last stages taken apart, so that a mistake can be planted between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from op_registry.registry import default_registry

from nnscaler.codegen.generate import generate
from nnscaler.codegen.python_text_of_calls import Origin, operator_origins
from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.insert_conversions import materialise
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Choice, PartitionedGraph
from nnscaler.scheduling.registry import schedule_of
from nnscaler.scheduling.schedule import Schedule
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan
from verify.self_test.programs.right_programs import Base

Sources = dict[str, str]
Text = Callable[[], Sources | None]  # the role programs of a mutant; None where the compiler refuses it


@dataclass(frozen=True)
class Generation:
    """The intermediate results between the plan and the text of one program."""

    plan: Plan
    title: str
    known: Mapping[str, Signature]
    partitioned: PartitionedGraph
    communicated: CommunicatedGraph
    order: Schedule
    origins: Mapping[str, Origin]

    def text(self, communicated: CommunicatedGraph) -> Sources:
        """Return the role programs of a communicated graph."""
        return generate(communicated, self.order, self.plan, self.title, self.origins)

    def text_of_placements(self, partitioned: PartitionedGraph, known: Mapping[str, Signature]) -> Sources | None:
        """Return the role programs of a partitioned graph; None where the compiler refuses it."""
        try:
            return self.text(materialise(partitioned, known))
        except (NnscalerError, AssertionError, KeyError, IndexError, ValueError, StopIteration):
            return None

    def placed(self, name: str, place: tuple[int, int], choice: Choice, wrong: Signature | None = None) -> Text:
        """Return the role programs with another choice for an operation on (stage, axis), and another signature."""

        def text() -> Sources | None:
            old, (stage, axis) = self.partitioned.placements[name], place
            here = (*old.choices[stage][:axis], choice, *old.choices[stage][axis + 1 :])
            choices = tuple(here if s == stage else c for s, c in enumerate(old.choices))
            placements = {**self.partitioned.placements, name: replace(old, choices=choices)}
            known = self.known if wrong is None else {**self.known, name: wrong}
            return self.text_of_placements(replace(self.partitioned, placements=placements), known)

        return text


def generation_of(base: Base) -> Generation:
    """Compile the program again, keeping every stage. Its text is the program's, bit for bit."""
    program = base.subject.program
    plan, graph = program.plan, program.graph
    known = dict(signatures(graph, default_registry()))
    partitioned = apply_plan(graph, known, plan)
    communicated = materialise(partitioned, known)
    order = schedule_of(plan, communicated.without_gradient)
    functions = {name: opaque.function for name, opaque in base.traced.functions.items()}
    origins = operator_origins((op.operator for op in graph.operations), functions)
    made = Generation(plan, program.manifest.model["name"], known, partitioned, communicated, order, origins)
    assert made.text(communicated) == dict(program.sources), "the compiler is not deterministic"
    return made

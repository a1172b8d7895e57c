"""The compiler's last stages taken apart, so that a mistake can be planted between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from op_registry.registry import default_registry

from nnscaler.codegen.generate import generate
from nnscaler.codegen.origins import Origin, operator_origins
from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.materialise import materialise
from nnscaler.errors import NnscalerError
from nnscaler.ir.placement import PartitionedGraph
from nnscaler.ir.signature import Signature, signatures
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan
from verify.self_test.programs.corpus import Base


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

    def text(self, communicated: CommunicatedGraph) -> dict[str, str]:
        """Return the role programs of a communicated graph."""
        return generate(communicated, self.order, self.plan, self.title, self.origins)

    def text_of_placements(
        self, partitioned: PartitionedGraph, known: Mapping[str, Signature] | None = None
    ) -> dict[str, str] | None:
        """Return the role programs of a partitioned graph; None where the compiler refuses it."""
        try:
            return self.text(materialise(partitioned, self.known if known is None else known))
        except (NnscalerError, AssertionError, KeyError, IndexError, ValueError, StopIteration):
            return None


def generation_of(base: Base) -> Generation:
    """Compile the program again, keeping every stage. Its text is the program's, bit for bit."""
    program = base.subject.program
    plan, graph = program.plan, program.graph
    known = dict(signatures(graph, default_registry()))
    partitioned = apply_plan(graph, known, plan)
    communicated = materialise(partitioned, known)
    order = get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches)
    functions = {name: opaque.function for name, opaque in base.traced.functions.items()}
    origins = operator_origins((op.operator for op in graph.operations), functions)
    made = Generation(plan, str(program.manifest["model"]["name"]), known, partitioned, communicated, order, origins)
    assert made.text(communicated) == dict(program.sources), "the compiler is not deterministic"
    return made

"""Table T: thirty bugs of real systems, each planted in a right program that has its mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verify.self_test.programs.mutants import runtime_faults
from verify.self_test.programs.mutants.mutant import Edit, Mutant, apply_edits
from verify.self_test.programs.mutants.runtime_faults import Fault
from verify.self_test.programs.right_programs import Base


@dataclass(frozen=True, slots=True)
class Change:
    """In the first line of a role that contains `line`, `old` becomes `new`; `after` is a line that follows it."""

    line: str
    old: str = ""
    new: str = ""
    role: int = 0
    after: str = ""


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One row of the table of known bugs.

    base     a key of `BASES`
    says     words that the finding must all contain
    instead  what is planted where the systems have an axis that we lack
    """

    number: int
    bug: str
    base: str
    says: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    fault: Fault | None = None
    instead: str = ""

    def mutant(self, base: Base) -> Mutant:
        """Return the program with the bug in its text. Raises ValueError where a line is not there."""
        sources = base.subject.program.sources
        edits = tuple(_edit(sources, change) for change in self.changes)
        runtime = self.bug if self.fault else ""
        return Mutant(base.spec.model, base.spec.name, "table T", self.bug, edits, apply_edits(sources, edits), runtime)


def _edit(sources: Mapping[str, str], change: Change) -> Edit:
    file = f"role_{change.role}.py"
    for number, line in enumerate(sources[file].split("\n"), 1):
        if change.line in line and change.old in line:
            indent = line[: len(line) - len(line.lstrip())]
            after = f"\n{indent}{change.after}" if change.after else ""
            return Edit(file, number, line, line.replace(change.old, change.new, 1) + after)
    raise ValueError(f"{file} has no line with {change.line!r} and {change.old!r}")


def _backward(name: str, other: str) -> Change:
    """Leave the value of a variable, and make its gradient that of another expression."""
    return Change(f"{name} = ", after=f"{name} = {name}.detach() + ({other}) - ({other}).detach()")


CP = "there is no context parallelism here: the axis is dp, over which the loss is a sum as well"
ROWS: tuple[PlantedBug, ...] = (
    PlantedBug(1, "forward all_reduce of a partial sum missing", "sharded", ("all_reduce", "tp", "missing"),
        (Change("linear_3_v1 = comm", "comm.all_reduce(linear_3, self.tp)", "linear_3"),)),
    PlantedBug(2, "all_gather where an all_reduce belongs", "sharded", ("all_reduce",),
        (Change("linear_3_v1 = comm", "comm.all_reduce(linear_3, self.tp)",
            "comm.all_gather(linear_3, self.tp, dim=2)"),)),
    PlantedBug(3, "backward of a fused communication is the identity", "sharded", ("backward", "all_reduce", "tp"),
        (Change("layer_norm_1_v1 = comm", "comm.replicate(layer_norm_1, self.tp)", "layer_norm_1"),)),
    PlantedBug(4, "send and recv between stages name the wrong ranks", "staged", ("rank",),
        (Change("Send(", "peers=(2, 3)", "peers=(3, 2)"), Change("Receive(", "peers=(0, 1)", "peers=(1, 0)", 1))),
    PlantedBug(5, "a constant differs on one rank", "sharded", ("ranks", "different"),
        (Change("add_1 = aten", ", 0.01)", ", 0.01 if self.tp.index else 0.02)"),)),
    PlantedBug(6, "backward of a tensor that is read twice takes one gradient only", "sharded", ("gradient", "detach"),
        (Change("add_3 = aten", "(add_2,", "(add_2.detach(),"),)),
    PlantedBug(7, "rotary positions: outputs of the backward swapped", "rotary", ("gradient", "transpose"),
        (Change("self_test_turn_a, self_test_turn_b =", "(transpose, transpose_1,",
            "(transpose.detach() + transpose_1 - transpose_1.detach(), "
            "transpose_1.detach() + transpose - transpose.detach(),"),)),
    PlantedBug(8, "scale that is inconsistent between ranks", "sharded", ("rank", "tp"),
        (Change("linear_3_v1 = comm", "comm.all_reduce(linear_3, self.tp)",
            "comm.all_reduce(linear_3, self.tp) * (2.0 if self.tp.index == 0 else 1.0)"),)),
    PlantedBug(9, "gradients are summed over ranks before the last micro-batch", "staged", ("micro-batch",),
        fault=runtime_faults.early_reducer("last.weight")),
    PlantedBug(10, "all_gather over the group of another axis", "experts", ("all_gather", "over dp", "wrong"),
        (Change("linear_v1 = comm", "self.tp", "self.dp"),)),
    PlantedBug(11, "router weight under sequence parallelism: gradient not summed over tp", "router",
        ("tp", "all_reduce"), (Change('"router_weight"', 'reduce=("dp", "tp")', 'reduce=("dp",)'),)),
    PlantedBug(12, "layer norm under sequence parallelism: gradient not summed over tp", "sequence",
        ("tp", "all_reduce"), (Change('"blocks_0_norm_weight"', 'reduce=("dp", "tp")', 'reduce=("dp",)'),)),
    PlantedBug(13, "gradients multiplied by the size of an axis whose average is taken of the loss only", "sharded",
        ("dp", "size", "2 times"), (_backward("cross_entropy_loss", "self.dp.size * cross_entropy_loss"),), instead=CP),
    PlantedBug(14, "gradients of one part keep a scale whose average was skipped", "sharded", ("tail", "2 times"),
        (_backward("cross_entropy_loss_tail", "self.dp.size * cross_entropy_loss_tail"),), instead=CP),
    PlantedBug(15, "sum of a tied embedding mixes different shards", "sharded stages", ("tied",),
        fault=runtime_faults.mixed_shards("words.weight")),
    PlantedBug(16, "tied head and embedding drift apart", "staged", ("tied",),
        fault=runtime_faults.drifting_copy("words.weight")),
    PlantedBug(17, "a stale bucket of gathered parameters", "sharded", ("stale",),
        fault=runtime_faults.stale_parameter("blocks.1.up.weight")),
    PlantedBug(18, "buffer of gradients not zeroed", "sharded", ("step before",), fault=runtime_faults.kept_gradients),
    PlantedBug(19, "an expert's parameter is summed over the ranks of dense ones", "experts", ("tp",),
        (Change('"up": Parameter', 'reduce=("dp",)', 'reduce=("dp", "tp")'),)),
    PlantedBug(20, "gradients of an auxiliary loss lack the factor of an axis", "losses", ("dp", "size", "1/2"),
        (_backward("mul_2", "mul_2 / self.dp.size"),), instead=CP),
    PlantedBug(21, "gradients normalised by the tokens of the own rank, the loss by all", "sharded",
        ("gradient", "tail"), (_backward("cross_entropy_loss", "cross_entropy_loss_tail / cross_entropy_loss_count"),),
        instead=CP),
    PlantedBug(22, "label smoothing takes the mean of the own part of the vocabulary", "losses", ("20", "10"),
        (Change("div = aten.div.Tensor", ", 20)", ", 10)"),)),
    PlantedBug(23, "gathered logits fed to the vocabulary-parallel loss", "losses", ("2 times", "tp"),
        (Change("cross_entropy_loss_1_sumexp = ops", "ops.ce_sumexp(linear_3",
            "ops.ce_sumexp(comm.all_gather(linear_3, self.tp, dim=1)"),)),
    PlantedBug(24, "gradients of a second loss normalised by unequal counts of each rank", "losses",
        ("gradient", "tail"),
        (_backward("cross_entropy_loss_1",
            "cross_entropy_loss_1_tail / (cross_entropy_loss_1_count * self.dp.size)"),)),
    PlantedBug(25, "recomputation in backward uses the group of another axis", "recomputed",
        ("ranks or runs", "self.dp"),
        (Change("linear_1_v1 = comm", "linear_1_v1 = comm.all_reduce(linear_1, self.tp)",
            "self._again = not getattr(self, '_again', True); "
            "linear_1_v1 = comm.all_reduce(linear_1, self.dp if self._again else self.tp)"),)),
    PlantedBug(26, "sinks of sharded heads counted on one rank only", "sharded", ("rank", "tp"),
        (Change("exp_1 = aten", "self.blocks_0_attention_sinks",
            "(self.blocks_0_attention_sinks if self.tp.index == 0 else self.blocks_0_attention_sinks.detach())"),)),
    PlantedBug(27, "all_reduce in place overwrites the local sum that backward reads", "experts", ("gradient", "sum_1"),
        (_backward("mul_1", "sum_1_v1 * sum_1_v1"),),
        instead="backward of the product reads what the all_reduce left in the place of the local sum"),
    PlantedBug(28, "norm that all heads share: gradient not summed over tp", "sharded", ("tp", "all_reduce"),
        (Change('"blocks_0_attention_out_norm"', 'reduce=("dp", "tp")', 'reduce=("dp",)'),)),
    PlantedBug(29, "checkpoint names that count layers from the start of a stage", "staged", ("blocks.1", "checkpoint"),
        fault=runtime_faults.names_of_stages),
    PlantedBug(30, "gradients of a shared adapter summed on a dummy tensor", "adapted", ("dp", "all_reduce"),
        fault=runtime_faults.dummy_reduced("lora")),
)  # fmt: skip

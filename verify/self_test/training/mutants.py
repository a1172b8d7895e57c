"""The table of training mutants: what is planted, in which right run, and the words by which a finding names it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.training.engine import Engine
from nnscaler.training.saving import checkpoints
from verify.programs.training import rank_loop
from verify.programs.training.rank_loop import Loop
from verify.self_test.training import engine_faults as faults
from verify.self_test.training import loop_faults as loops
from verify.self_test.training import overlap_faults as overlap
from verify.self_test.training.engine_faults import Fault

UP, DOWN, BIAS, TIED = "layers.0.up.weight", "layers.1.down.weight", "layers.0.up.bias", "words.weight"


@dataclass(frozen=True, slots=True)
class TrainingMutant:
    """One row.

    base       a key of `BASES`
    says       words that one finding must all contain, in its message or its cause
    optimizer  of the run
    saved      the run is saved in the middle, and goes on from what is read
    """

    family: str
    bug: str
    base: str
    says: tuple[str, ...]
    fault: Fault
    optimizer: str = "adamw"
    saved: bool = False


def _row(family: str, base: str, bug: str, says: str, fault: Fault, optimizer: str = "adamw") -> TrainingMutant:
    return TrainingMutant(family, bug, base, tuple(says.split("; ")), fault, optimizer, family == "checkpoint")


def _half(_name: str, gradient: Tensor, _rank: int) -> Tensor:
    return gradient.to(torch.bfloat16).to(gradient.dtype)


def _whole_states(right: faults.Change) -> faults.Change:
    def states(optimizer: object, parameters: object) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = right(optimizer, parameters)
        return {n: {k: torch.cat([v, v]) if v.dim() else v for k, v in s.items()} for n, s in found.items()}

    return states


def _again(right: faults.Change, self: RankExecutor, limit: float) -> Tensor:
    total: Tensor = right(self, limit)
    faults.scale_gradients(self, min(1.0, limit / (float(total) + 1e-6)))
    return total


SUMS = (
    _row("gradient sum", "dp", "gradient averaged over ranks", "gradient; averaged",
         faults.summed(lambda h, own, total, c: total / len(h.group))),
    _row("gradient sum", "dp3", "gradient averaged twice", "gradient; 1/9",
         faults.summed(lambda h, own, total, c: total / len(h.group) ** 2)),
    _row("gradient sum", "dp", "gradient summed twice", "gradient; 2 times; summed once too often",
         faults.summed(lambda h, own, total, c: total * len(h.group))),
    _row("gradient sum", "dp3", "all_reduce skipped", "gradient; sum over ranks is missing",
         faults.summed(lambda h, own, total, c: own)),
    _row("gradient sum", "dp", "all_reduce of one parameter skipped", f"gradient; {DOWN}; sum over ranks is missing",
         faults.summed(lambda h, own, total, c: own if h.fqn == DOWN else total)),
    _row("gradient sum", "dp", "a rank does not take the sum", "rank 1 alone; own data part alone",
         faults.summed(lambda h, own, total, c: own if c.rank == 1 else total)),
    _row("gradient sum", "mesh", "sum over the wrong axis", "gradient; sum over ranks is missing",
         faults.summed(lambda h, own, total, c: own)),
    _row("gradient sum", "staged", "sum over the copies of a tied parameter skipped", "gradient; sum over its copies",
         faults.summed(lambda h, own, total, c: own if h.fqn == TIED else total)),
    _row("gradient sum", "dp", "gradient cast down to bfloat16", "rounded to bfloat16; cast down",
         faults.finished(_half)),
    _row("gradient sum", "zero1", "gradient cast down to float16", "rounded to float16; cast down",
         faults.finished(lambda n, g, r: g.to(torch.float16).to(g.dtype))),
    _row("gradient sum", "zero3", "gradient cast down to float32", "rounded to float32; cast down",
         faults.finished(lambda n, g, r: g.to(torch.float32).to(g.dtype))),
    _row("gradient sum", "dp", "gradient of a parameter lost", f"{UP}; zero",
         faults.finished(lambda n, g, r: torch.zeros_like(g) if n == UP else g)),
    _row("gradient sum", "dp", "stale reduction", f"{UP}; gradient of the step before", faults.stale_gradient(UP)),
    _row("gradient sum", "tp", "sign of a gradient turned", f"{UP}; sign",
         faults.finished(lambda n, g, r: -g if n == UP else g)),
    _row("gradient sum", "dp", "copies of a gradient differ in rounding", "different copies; rounding",
         faults.finished(lambda n, g, r: g * (1 + 2.0**-52) if r == 1 else g)),
)  # fmt: skip

ZERO = (
    _row("ZeRO", "zero1", "reduce-scatter skipped", "gradient; sum over ranks is missing",
         faults.scattered(lambda pieces, d: pieces[d.index])),
    _row("ZeRO", "zero2", "reduce-scatter skipped, stage 2", "gradient; sum over ranks is missing",
         faults.scattered(lambda pieces, d: pieces[d.index])),
    _row("ZeRO", "zero1", "reduce-scatter averages", "gradient; averaged",
         faults.finished(lambda n, g, r: g / 2)),
    _row("ZeRO", "zero2 micro", "the last micro-batch alone is kept", "gradient; micro-batch 1 alone",
         faults.last_micro_batch_alone()),
    _row("ZeRO", "zero1", "stale gather", "stale gather",
         faults.gathered(lambda e, value, count: value if count == 0 or count % 2 else None)),
    _row("ZeRO", "zero2", "stale gather of one parameter", "stale; layers.1.down.bias",
         faults.gathered(lambda e, v, count: None if count and faults.name_of(e) == "layers.1.down.bias" else v)),
    _row("ZeRO", "zero1", "shards gathered in the wrong order", f"{DOWN}; gathered in the wrong order",
         faults.gathered(lambda e, v, count: faults.turned(e, v) if faults.name_of(e) == DOWN else v)),
    _row("ZeRO", "zero1", "uneven shard off by one", "gathered one element off",
         faults.gathered(lambda e, v, count: faults.one_off(e, v))),
    _row("ZeRO", "zero1", "gather in bfloat16", "rounded to bfloat16",
         faults.gathered(lambda e, value, count: value.bfloat16().to(value.dtype))),
    _row("ZeRO", "zero1", "shard updated twice", "rank 1 alone; twice",
         loops.loop("update", loops.on(1, loops.at(1, loops.twice)))),
    _row("ZeRO", "zero3", "shard not updated", "rank 0 alone; no update",
         loops.loop("update", loops.on(0, loops.at(1, loops.skip)))),
    _row("ZeRO", "zero2", "owner lacks a parameter", f"{DOWN}; has none",
         loops.without_one(1, DOWN)),
    _row("ZeRO", "zero1", "neighbour's state", "has the piece of rank", loops.loop(
        "update", loops.at(2, loops.state(loops.exchanged_state)))),
    _row("ZeRO", "zero1", "states kept whole on every rank", "its shard is",
         faults.changed(rank_loop, "states_of", _whole_states)),
)  # fmt: skip


OVERLAP = (
    _row("overlap", "dp", "sum begins before a gradient is complete", f"{DOWN}; written after it began",
         overlap.early_start(DOWN)),
    _row("overlap", "dp", "sum read before it is waited for", "sum over ranks is missing", overlap.early_read()),
    _row("overlap", "dp", "nothing waits for a sum", f"{DOWN}; nothing waited for it", overlap.no_wait()),
    _row("overlap", "dp", "two views of a bucket exchanged",
         f"{UP}; the gradient of `layers.1.up.weight`; place of another",
         overlap.wrong_view(UP, "layers.1.up.weight")),
    _row("overlap", "dp", "buckets in another order on one rank", "sum gradients of different parameters",
         overlap.other_order(1)),
    _row("overlap", "dp", "a bucket that never leaves", f"{DOWN}; sum over ranks is missing",
         overlap.forgotten(DOWN)),
    _row("overlap", "staged dp", "gradient summed after each micro-batch",
         f"{UP}; summed over ranks after each micro-batch",
         overlap.summed_each_time(UP)),
    _row("overlap", "zero3", "whole read before it is gathered", "nothing waited for it", overlap.unawaited_whole()),
    _row("overlap", "zero3", "part of a gradient added before its sum", "zero", overlap.early_part()),
    _row("overlap", "zero3", "parameters gathered before the update", "stale",
         overlap.gathered_before_the_update),
)  # fmt: skip


CLIPPING = (
    _row("clipping", "dp", "clip before unscale", "clip before unscale",
         faults.norm(lambda stages, c, right: right * 65536.0)),
    _row("clipping", "zero1", "norm of own shards", "not summed over the ranks", faults.norm(faults.local_norm)),
    _row("clipping", "dp", "copies counted in the norm", "counted 2 times", faults.norm(faults.copies_counted)),
    _row("clipping", "staged", "tied parameter counted twice in the norm", f"{TIED}; counted twice",
         faults.norm(faults.tied_twice)),
    _row("clipping", "dp", "norm of the step before", "norm of the step before", faults.last_norm()),
    _row("clipping", "dp", "norm of the wrong type", "norm of type infinity",
         faults.changed(Engine, "clip_grad_norm_",
                        lambda right: lambda self, limit, kind=2.0: right(self, limit, float("inf")))),
    _row("clipping", "dp", "not clipped", "not clipped", faults.clipped(lambda right, self, m: right(self, 1e9))),
    _row("clipping", "zero2", "clipped twice", "clipped twice", faults.clipped(_again)),
    _row("clipping", "dp", "a rank does not clip", "rank 1 alone; not clipped",
         faults.clipped(lambda right, self, m: right(self, 1e9 if self.rank == 1 else m))),
)  # fmt: skip


def _in(dtype: torch.dtype, wanted: str) -> faults.Change:
    return loops.state(lambda n, key, t, loop: t.to(dtype).to(t.dtype) if key == wanted else t)


UPDATES = (
    _row("update", "dp", "weight decay on all groups", "weight decay on the wrong group; all parameters are decayed",
         loops.decayed_but(lambda engine, course: ())),
    _row("update", "zero1", "weight decay on no group", "weight decay on the wrong group; none is decayed",
         loops.decayed_but(lambda engine, course: engine.parameters)),
    _row("update", "dp", "groups exchanged", "weight decay on the wrong group; exchanged",
         loops.decayed_but(lambda engine, course: engine.parameters.keys() - course.undecayed)),
    _row("update", "staged", "weight decay on the wrong group, SGD", "weight decay on the wrong group; all parameters",
         loops.decayed_but(lambda engine, course: ()), "sgd"),
    _row("update", "dp", "decay in the gradient", "weight decay goes into the gradient",
         loops.optimizer(loops.with_l2)),
    _row("update", "dp", "tied parameter updated twice", f"{TIED}; twice", loops.loop("update", loops.tied_update)),
    _row("update", "tp", "update made twice", "twice", loops.loop("update", loops.at(2, loops.twice))),
    _row("update", "dp", "local found_inf: a rank skips the step", "rank 1 alone; no update",
         loops.loop("update", loops.on(1, loops.at(2, loops.skip)))),
    _row("update", "zero2", "local found_inf under ZeRO", "rank 2 alone; no update",
         loops.loop("update", loops.on(2, loops.at(1, loops.skip)))),
    _row("update", "staged dp", "a stage skips the step", "rank 2, 3 alone; no update",
         loops.loop("update", lambda right, self: None if self.engine.rank >= 2 and _second(self) else right(self))),
    _row("update", "dp", "all ranks skip a step", "no update", loops.loop("update", loops.at(3, loops.skip))),
    _row("update", "zero3", "bias correction counts batches", "counts batches",
         loops.loop("update", loops.state(loops.counts_batches))),
    _row("update", "dp", "bias correction starts again", "starts again",
         loops.loop("update", loops.state(lambda n, key, t, loop: t * 0 + 1 if key == "step" else t))),
    _row("update", "zero1", "state lost at a step", "state was lost",
         loops.loop("update", loops.at(2, loops.without_lasting_state))),
    _row("update", "dp", "momentum lost", "momentum; state was lost",
         loops.loop("update", loops.at(1, loops.without_lasting_state)), "sgd"),
    _row("update", "dp", "first moment in bfloat16", "exp_avg; kept in bfloat16",
         loops.loop("update", _in(torch.bfloat16, "exp_avg"))),
    _row("update", "zero1", "second moment in float16", "exp_avg_sq; kept in float16",
         loops.loop("update", _in(torch.float16, "exp_avg_sq"))),
    _row("update", "zero3", "momentum in half, SGD", "momentum; kept in bfloat16",
         loops.loop("update", _in(torch.bfloat16, "momentum_buffer")), "sgd"),
    _row("update", "dp", "master missing", "kept in bfloat16; no master copy",
         loops.loop("update", loops.values(lambda n, p: p.bfloat16().to(p.dtype)))),
    _row("update", "dp", "copies drift by rounding", "different copies; rounding",
         loops.loop("update", loops.on(1, loops.values(lambda n, p: p * (1 + 2.0**-52))))),
    _row("update", "zero1", "update by the gradient of the step before", "gradient of the step before",
         loops.loop("update", loops.before_update(loops.last_gradients))),
    _row("update", "dp", "gradient averaged once more before the update", "averaged twice",
         loops.loop("update", loops.before_update(lambda loop, n, g: g / 2))),
    _row("update", "tp", "update goes the wrong way", "sign",
         loops.loop("update", loops.before_update(lambda loop, n, g: -g))),
    _row("update", "staged", "one copy of a tied parameter is not updated", f"{TIED}; rank 1 alone; no update",
         loops.loop("update", loops.on(1, loops.before_update(lambda loop, n, g: None if n == TIED else g)))),
)  # fmt: skip


def _second(self: Loop) -> bool:
    count: int = self.__dict__.get("_updates", 0) + 1
    self.__dict__["_updates"] = count
    return count == 2


RATES = (
    _row("schedule", "dp", "scheduler off by one, ahead", "scheduler is off by one; step after",
         loops.loop("__init__", loops.scheduled_early)),
    _row("schedule", "zero1", "scheduler off by one, behind", "scheduler is off by one; step before",
         loops.loop("schedule", loops.at(1, loops.skip))),
    _row("schedule", "dp", "scheduler steps per batch", "steps once per batch",
         loops.loop("accumulate", loops.scheduled_per_batch)),
    _row("schedule", "dp", "scheduler never steps", "learning rate; step before", loops.loop("schedule", loops.skip)),
    _row("schedule", "staged", "scheduler steps on one stage only", "rank 1 alone; step before",
         loops.loop("schedule", loops.on(1, loops.skip))),
    _row("schedule", "dp", "second group not scheduled", f"learning rate of `{UP}`; step before",
         loops.loop("schedule", loops.scheduler_of_first_group)),
    _row("schedule", "tp", "scheduler steps twice", "scheduler; step after",
         loops.loop("schedule", loops.twice)),
)  # fmt: skip

DATA = (
    _row("data", "dp", "replayed batch", "loss; replayed", loops.loop("batches", loops.other_step(-1, 3))),
    _row("data", "zero1", "skipped batch", "loss; skipped", loops.loop("batches", loops.other_step(1, 1))),
    _row("data", "staged", "an epoch begins again too early", "loss of batch 0; replayed",
         loops.loop("batches", loops.other_step(-3, 3))),
    _row("data", "dp3", "all parts read the rows of one", "order of data depends on the rank; data part 1",
         loops.read(lambda loop, batch: loops.of_part(loop, 1, batch))),
    _row("data", "dp", "labels of another data part", "loss; different data parts",
         loops.read(loops.labels_of_next)),
    _row("data", "dropped", "data parts exchanged", "data parts are exchanged",
         loops.read(lambda loop, batch: loops.of_part(loop, 1 - loop.engine.data_part.index, batch))),
    _row("data", "dp", "short batch filled up with its own rows", "short batch is filled up",
         loops.read(loops.filled_up)),
    _row("data", "dp", "accumulation drops a batch", "gradient; accumulation drops",
         loops.loop("accumulate", loops.cleared_between)),
    _row("data", "zero1", "gradients averaged over accumulated batches", "gradient; divided by the 2 batches",
         loops.loop("accumulate", loops.averaged_over_batches)),
    _row("data", "dp", "gradients not cleared", "gradient; not cleared",
         loops.loop("clear", loops.skip)),
    _row("data", "zero2", "gradients not cleared under ZeRO", "gradient; not cleared",
         loops.loop("clear", loops.skip), "sgd"),
)  # fmt: skip

MODES = (
    _row("mode", "dropped", "dropout off in training", "dropout is off", loops.context(loops.dropout_off)),
    _row("mode", "dropped", "random numbers never advance", "random numbers of batch 0",
         loops.set_passes(lambda engine: 0)),
    _row("mode", "dropped", "random numbers by optimizer step", "random numbers of batch 2",
         loops.set_passes(lambda engine: engine.context.step)),
    _row("mode", "modes", "evaluation in training mode", "evaluation; training mode",
         loops.evaluated(loops.in_training_mode)),
    _row("mode", "modes", "evaluation changes buffers", "after an evaluation; changes buffers",
         loops.evaluated(loops.with_a_step)),
    _row("mode", "modes", "evaluation with the buffers of the start", "buffers are not handed over",
         faults.changed(RankExecutor, "take_buffers", lambda right: lambda self, other: None)),
    _row("mode", "modes", "buffers never change", "buffer; never changes",
         faults.changed(RankExecutor, "_update", lambda right: lambda self, stage, outputs: None)),
    _row("mode", "modes", "a rank does not change its buffers", "buffer; rank 1 alone; never changes",
         faults.changed(RankExecutor, "_update",
                        lambda right: lambda self, *given: None if self.rank == 1 else right(self, *given))),
)  # fmt: skip

LOSSES = (
    _row("loss", "dp", "loss of own rows", "loss; sum over ranks is missing", loops.unsummed_loss()),
    _row("loss", "staged", "loss told by the wrong rank", "loss; it is zero", loops.told(loops.from_wrong_rank)),
    _row("loss", "dp", "loss summed twice", "loss; 2 times",
         loops.told(lambda right, self, running, loss: right(self, running, None if loss is None else loss * 2))),
)  # fmt: skip

PRECISION = (
    _row("precision", "masters", "master missing in mixed precision", "tensor at rest; bfloat16; no master copy",
         loops.loop("update", loops.narrow("parameter"))),
    _row("precision", "masters", "gradient cast down in mixed precision", "gradient; bfloat16; cast down",
         loops.loop("accumulate", loops.narrow("gradient")), "sgd"),
    _row("precision", "masters", "optimizer state in half in mixed precision", "exp_avg; bfloat16; optimizer's state",
         loops.loop("update", loops.narrow("state"))),
)  # fmt: skip

CHECKPOINTS = (
    _row("checkpoint", "zero1", "the optimizer's state is not read", "`exp_avg` of; not what was saved",
         faults.changed(checkpoints, "read_optimizer", lambda right: lambda *given: None)),
    _row("checkpoint", "tp", "the schedule is not read", "the rate of parameter group 0; not what was saved",
         faults.changed(checkpoints, "_read_parts", lambda right: lambda *given: None), "sgd"),
    _row("checkpoint", "dropped", "the counts are not read", "the number of steps; not what was saved",
         faults.changed(checkpoints, "read_run", lambda right: lambda opened: replace(right(opened), passes=0))),
    _row("checkpoint", "modes", "buffers are not read", "the buffer; running_mean",
         faults.changed(checkpoints, "read_model", loops.without_buffers)),
    _row("checkpoint", "zero2", "weights are rounded", f"the parameter `{UP}`; not what was saved",
         faults.changed(checkpoints, "model_shards", loops.rounded_shards)),
    _row("checkpoint", "staged dp", "a rank begins anew", "on rank 3; the parameter",
         faults.changed(checkpoints, "read_model", loops.on_other_ranks_than(3))),
)  # fmt: skip

ROWS: tuple[TrainingMutant, ...] = (
    *CHECKPOINTS,
    *PRECISION,
    *SUMS,
    *ZERO,
    *OVERLAP,
    *CLIPPING,
    *UPDATES,
    *RATES,
    *DATA,
    *MODES,
    *LOSSES,
)

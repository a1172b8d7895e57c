"""Compile on rank 0, and give the other ranks what came out: they have the model, and need no second trace of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from nnscaler.codegen.compiled_program import Origin, Program
from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.tracing.models_with_added_loss import LossFunction, with_loss
from nnscaler.tracing.sample_inputs import flatten_inputs
from nnscaler.tracing.set_and_restore_modes import modes_of


def compile_once(
    compile_program: Callable[[], Program], module: nn.Module, batch: Any, loss_fn: LossFunction | None = None
) -> Program:
    """Return the program on every rank; `compile_program` is called on rank 0. Every rank calls this.

    `module`, `batch`, `loss_fn`: what it compiles, as each rank has made them. Raises on every rank what compiling
    raises, and NnscalerError: "replicas_differ" for a model without a tensor that rank 0's has, "rank_lost" where
    another rank has ended.
    """
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if not several:
        return compile_program()
    program: Program | None = None
    told, error = [b""], None
    if torch.distributed.get_rank() == 0:
        try:
            program = compile_program()
            told = [pack_program(program)]
        except Exception as raised:  # noqa: BLE001 - raised when the others know
            error = raised
            known = isinstance(raised, NnscalerError)
            answer = raised if known else NnscalerError("trace_failed", f"{type(raised).__name__}: {raised}")
            told = [pickle.dumps(answer)]
    try:
        torch.distributed.broadcast_object_list(told, 0)
    except RuntimeError as lost:  # of gloo or NCCL, where another rank has ended meanwhile
        message = f"another rank ended while the model was compiled: {in_one_line(lost)}"
        raise NnscalerError("rank_lost", message) from lost
    if error is not None:
        raise error
    if program is not None:
        return program
    return unpack_program(told[0], module, batch, loss_fn)


def pack_program(program: Program) -> bytes:
    """Return what another process cannot take from its own model: all but tensors that are the model's."""
    named = {name for entry in program.manifest.parameters for name in entry.fqns}
    named |= {name for entry in program.manifest.buffers for name in entry.fqns}
    made = {name: tensor.detach().cpu() for name, tensor in program.state.items() if name not in named}
    origin = program.origin
    assert origin is not None
    fields = (program.sources, program.manifest, program.plan, program.graph, tuple(program.state), made)
    return pickle.dumps((*fields, origin.specialise, origin.repeat_layers))


def unpack_program(packed: bytes, module: nn.Module, batch: Any, loss_fn: LossFunction | None = None) -> Program:
    """Return a program that another process packed, over this one's module. Raises as `compile_once`."""
    told = pickle.loads(packed)
    if isinstance(told, NnscalerError):
        raise told
    sources, manifest, plan, graph, names, made, specialise, repeat_layers = told
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    lacking = next((name for name in names if name not in own and name not in made), None)
    if lacking is not None:
        here = f" of rank {torch.distributed.get_rank()}" if torch.distributed.is_initialized() else ""
        message = f"the model{here} has no `{lacking}`, which that of rank 0 has"
        raise NnscalerError("replicas_differ", message, help="make the same model on every rank")
    state: Mapping[str, Tensor] = {name: made[name] if name in made else own[name] for name in names}
    sample = flatten_inputs(module if loss_fn is None else with_loss(module, loss_fn), batch)
    origin = Origin(module, sample.rebuild, loss_fn, specialise, repeat_layers, modes=modes_of(module))
    return Program(sources, manifest, plan, graph, state, dict(sample.tensors), origin)

"""A trace of each model that tests verify again and again, once per process: they ask about what comes after it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from nnscaler.tracing import Traced, trace

PLAIN = frozenset(vars(nn.Module()))  # attributes that every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class TracedOnce:
    """`trace`, which gives the trace of an equal model on an equal batch again: of the same classes, with the same
    attributes, modes and values. A model with hooks is traced anew."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Traced] = {}

    def __call__(self, module: nn.Module, sample_inputs: Any, **options: Any) -> Traced:
        if any(getattr(part, hooks) for part in module.modules() for hooks in HOOKS):
            return trace(module, sample_inputs, **options)
        key = (_described(module), _values(sample_inputs), tuple(sorted(options.items())))
        if key not in self._known:
            traced = trace(module, sample_inputs, **options)
            self._known[key] = replace(traced, state=_copied(traced.state))
        found, own = self._known[key], dict(_named(module))
        # as of `trace`, what is the module's own is its own
        return replace(found, state={**_copied(found.state), **{n: own[n] for n in found.state if n in own}})


def _described(module: nn.Module) -> Hashable:
    parts = [
        (name, type(part), part.training, _values({k: v for k, v in vars(part).items() if k not in PLAIN}))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    named = _named(module)
    first = {id(tensor): name for name, tensor in reversed(named)}  # tied tensors are told by their first name
    state = [(name, first[id(tensor)], tensor.requires_grad, _values(tensor)) for name, tensor in named]
    return tuple(parts), tuple(state)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _values(given: Any) -> Hashable:
    leaves, structure = tree_flatten(given)
    return str(structure), tuple(_tensor(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def _tensor(tensor: Tensor) -> Hashable:
    kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return kind if tensor.is_meta else (*kind, repr(tensor.detach().tolist()))


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whoever trains changes tensors in place. Tied ones stay tied."""
    copies = {id(tensor): tensor.detach().clone() for tensor in state.values()}
    return {name: copies[id(tensor)].requires_grad_(tensor.requires_grad) for name, tensor in state.items()}

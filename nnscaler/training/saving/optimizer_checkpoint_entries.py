"""Entries of a checkpoint for the state of torch optimizers: by name of the parameter, sharded as it is.

optimizer.class                         its name
optimizer.groups                        hyper-parameters of its groups, in order
optimizer.param_groups.<name>           hyper-parameters of the group that a parameter is in
optimizer.state.<name>.<entry>          a tensor of the parameter's shape lies as it does; others are stored once
optimizer.others                        what its state has that belongs to no parameter, where it has any

A second optimizer is `optimizer_2`, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.layout import is_cut
from nnscaler.runtime.training.saving.checkpoint import MODEL
from nnscaler.runtime.training.saving.dcp import Folder, TensorShard, key_of, whole
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor, boxes_of, leads

CLASS, GROUPS, HYPER, STATE, OTHERS = "class", "groups", "param_groups", "state", "others"

_ANEW = "start from its weights alone, in another folder; in Python also: load it without an optimizer"

Held = Mapping[torch.nn.Parameter, StoredTensor]
Entries = tuple[list[TensorShard], dict[tuple[str, ...], object]]


def root_of(index: int) -> str:
    """Return the first part of the names of an optimizer's entries."""
    return "optimizer" if index == 0 else f"optimizer_{index + 1}"


def optimizer_entries(optimizer: torch.optim.Optimizer, held: Held, rank: int, root: str) -> Entries:
    """Return what this rank writes of the optimizer's state.

    Raises NnscalerError("optimizer_state") for a tensor that belongs to a shard and has another shape than it.
    """
    shards: list[TensorShard] = []
    objects: dict[tuple[str, ...], object] = {}
    if rank == 0:
        objects[root, CLASS] = type(optimizer).__name__
        objects[root, GROUPS] = [_hyper(group) for group in optimizer.param_groups]
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        objects |= {(root, OTHERS): others} if others else {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _entry(parameter, held)
            if leads(entry):
                objects[root, HYPER, entry.fqn] = _hyper(group)
            for name, value in optimizer.state.get(parameter, {}).items():
                path = (root, STATE, entry.fqn, name)
                if not isinstance(value, Tensor):
                    if leads(entry):
                        objects[path] = value
                elif value.shape == parameter.shape:
                    if entry.first:
                        shards.append(TensorShard(path, entry.shape, boxes_of(entry), value))
                elif value.dim() and _is_sharded(entry):
                    raise _refused(type(optimizer).__name__, entry, name, value)
                elif leads(entry):
                    shards.append(whole(path, value))
    return shards, objects


def read_optimizer(optimizer: torch.optim.Optimizer, held: Held, folder: Folder, root: str) -> None:
    """Give the optimizer the state in a checkpoint, under any plan. Its groups may be others than they were, where the
    parameters of each had equal hyper-parameters.

    Raises NnscalerError("other_optimizer"), and ProgramError as reading does.
    """
    paths = {key: path for key, path in folder.contents.paths.items() if path[0] == root}
    known = {path: key for key, path in paths.items()}
    kind, groups_ = (root, CLASS), (root, GROUPS)
    if kind not in known:
        message = f"{folder.path} was saved without {'an' if root == root_of(0) else 'a further'} optimizer"
        raise NnscalerError("other_optimizer", message, help=_ANEW)
    entries = {_entry(p, held).fqn: p for group in optimizer.param_groups for p in group["params"]}
    hyper = [known[path] for fqn in entries if (path := (root, HYPER, fqn)) in known]
    others = [known[root, OTHERS]] if (root, OTHERS) in known else []
    found = folder.read([], [known[kind], known[groups_], *others, *hyper])
    if found[known[kind]] != type(optimizer).__name__:
        message = f"{folder.path} has the state of {found[known[kind]]}, and this is {type(optimizer).__name__}"
        raise NnscalerError("other_optimizer", message, help=_ANEW)
    by_name = {paths[key][-1]: found[key] for key in hyper}
    groups = [
        _group(group, index, [_entry(p, held).fqn for p in group["params"]], by_name, found[known[groups_]])
        for index, group in enumerate(optimizer.param_groups)
    ]
    on_device = {fqn: bool(h.get("capturable") or h.get("fused")) for fqn, h in by_name.items()}
    states, shards, objects = _states(entries, held, folder, on_device, root)
    values = folder.read(shards, objects)
    for key, value in values.items():
        states.setdefault(paths[key][2], {})[paths[key][3]] = value
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    for fqn, parameter in entries.items():  # itself it would cast them to the parameter's dtype
        optimizer.state.pop(parameter, None)
        if fqn in states:
            optimizer.state[parameter] = states[fqn]
    for key in others:
        optimizer.state.update(found[key])


def _states(
    entries: Mapping[str, torch.nn.Parameter], held: Held, folder: Folder, on_device: Mapping[str, bool], root: str
) -> tuple[dict[str, dict[str, Any]], list[TensorShard], list[str]]:
    """Make room for the states of this rank's parameters: tensors by parameter, what is to be read into them, and the
    names of other objects. Of a parameter in another dtype than it was saved in, what had its dtype has the new one."""
    states: dict[str, dict[str, Any]] = {}
    shards: list[TensorShard] = []
    objects: list[str] = []
    for key, path in folder.contents.paths.items():
        if path[:2] != (root, STATE) or path[2] not in entries:
            continue
        parameter = entries[path[2]]
        entry = held[parameter]
        kind = folder.contents.tensors.get(key)
        if kind is None:
            objects.append(key)
            continue
        shape, dtype = kind
        saved = (folder.contents.tensors.get(key_of((MODEL, name))) for name in (entry.fqn, *entry.names))
        counts = path[3] == "step" or (entry.shape and not shape)  # in a dtype of its own
        if not counts and dtype == next((of[1] for of in saved if of is not None), None):  # it follows the parameter's
            dtype = parameter.dtype
        device = "cpu" if path[3] == "step" and not on_device[path[2]] else parameter.device  # as torch does
        if shape == entry.shape:
            value = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
            shards.append(TensorShard(path, shape, boxes_of(entry), value))
        else:
            value = torch.empty(shape, dtype=dtype, device=device)
            shards.append(whole(path, value))
        states.setdefault(path[2], {})[path[3]] = value
    return states, shards, objects


def _group(
    group: Mapping[str, Any], index: int, names: list[str], by_name: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a group as it was saved, with the places of its parameters as torch's state dicts have them."""
    lacking = next((name for name in names if name not in by_name), None)
    if lacking is not None:
        raise NnscalerError("other_optimizer", f"the optimizer of the checkpoint did not update `{lacking}`")
    if not names:  # of a rank without parameters in the group: the schedule reads it all the same
        hyper = groups[index] if index < len(groups) else _hyper(group)
    else:
        hyper = by_name[names[0]]
        other = next((name for name in names if by_name[name] != hyper), None)
        if other is not None:
            keys = sorted(k for k in hyper if by_name[other].get(k) != hyper[k])
            message = f"`{names[0]}` and `{other}` are in one group, and were in two with different {', '.join(keys)}"
            raise NnscalerError("other_optimizer", message, help="make the groups as they were when it was saved")
    return {**hyper, "params": list(range(len(names)))}


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _entry(parameter: torch.nn.Parameter, held: Held) -> StoredTensor:
    if parameter not in held:
        message = f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of the engine's"
        raise NnscalerError("other_optimizer", message, help="make it by engine.optimizer(torch.optim.AdamW, lr=...)")
    return held[parameter]


def _is_sharded(entry: StoredTensor) -> bool:
    return any(is_cut(state, entry.sizes[axis]) for axis, state in entry.states.items())


def _refused(optimizer: str, entry: StoredTensor, name: str, value: Tensor) -> NnscalerError:
    message = (
        f"{optimizer} keeps `{name}` of shape {list(value.shape)} for a shard of `{entry.fqn}`, which is "
        f"{list(entry.tensor.shape)}: a checkpoint cannot tell what part of the whole that is"
    )
    return NnscalerError("optimizer_state", message, help="let the parameter rest whole: a plan without zero and tp")

"""Feed the script on one rank with the data of all ranks, in one of four ways.

    own    its own data are those of the ranks together, maybe in another order: nothing is replaced
    whole  each of its batches is replaced by the rows of all data parts together
    turns  it takes as many micro-batches as all data parts together: they are given to it in turn
    part   one process for each data part, with this part's data; gradients are averaged after every backward pass

`own` assumes nothing. `whole` assumes that the script can work with more rows. `turns` assumes that it divides the loss
by the number of its micro-batches. `part` assumes what data parallelism means: the gradient is the mean over the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from verify.external.parameter_mapping import local_value
from verify.external.torchrun.replace_data_given_to_model import close, settings_of
from verify.external.torchrun.watched_script_record import Events, Settings, Tensors, Unmatched

Way = Literal["own", "whole", "turns", "part"]
_MIXED = ", although there are as many, and other data or single rows are"


@dataclass(frozen=True)
class Material:
    """The data that ranks took in, and the parameters that they started from.

    parts  the events of each data part
    taken  for each step: data event -> how many had come in on a rank
    start  whole parameters before the first step, by name; without those that cannot be put together
    settings for each step: those of each group of parameters
    draws  random numbers that each data part drew outside of models; empty where all drew the same
    reordered
           a seed for another order of the sums (`Start`)
    scalars
           of the data are those of the ranks; if not, the script's own, which it may have computed of the rows that it
           was given: by what a loss is divided, say
    summed the gradients of the data parts are added up, and not averaged
    """

    parts: tuple[Events, ...]
    taken: tuple[Mapping[str, int], ...]
    start: Mapping[str, Tensor]
    settings: tuple[tuple[Settings, ...], ...]
    draws: tuple[Tensors, ...] = ()
    reordered: int | None = None
    scalars: bool = True
    summed: bool = False

    @property
    def has_scalars(self) -> bool:
        """Return whether there are any among the data."""
        return any(not t.dim() for events in self.parts for kind in events.values() for event in kind for t in event)


@dataclass(frozen=True)
class RanksFeed:
    """Feeds one process.

    part    its number, for the way "part"
    add_up  sums a tensor over all such processes
    divided kinds of the script's own data of which each data part has had a part
    """

    material: Material
    way: Way
    tell: Callable[[str], None]
    part: int = 0
    add_up: Callable[[Tensor], None] | None = None
    divided: set[str] = field(default_factory=set)

    @property
    def steps(self) -> int:
        """Return the number of steps that the ranks made."""
        return len(self.material.taken)

    def data(self, kind: str, number: int, natural: Tensors) -> Tensors:
        """Return what is used in place of the script's own data."""
        parts = [events.get(kind, ()) for events in self.material.parts]
        count = len(parts)
        if self.way == "turns":
            part, index = number % count, number // count
        else:
            part, index = self.part, number
        if any(index >= len(events) for events in parts):
            if kind.startswith("batch"):
                return natural  # for evaluation, say: what reaches the model in training is seen there
            raise Unmatched(
                f"on one rank the script takes in more data ({kind}, number {number + 1}) than on the ranks"
            )
        here = [events[index] for events in parts]
        if len({len(tensors) for tensors in here} | ({len(natural)} if natural else set())) > 1:
            raise Unmatched(
                f"on one rank the script takes in other data ({kind}, number {number + 1}) than on the ranks"
            )
        if self.way in ("turns", "part"):
            kept = natural or here[part]
            pairs = zip(kept, here[part], strict=True)
            return self._replaced(
                kind, natural, tuple(new if old.dim() or self.material.scalars else old for old, new in pairs)
            )
        columns = list(zip(*here, strict=True))
        if not natural:
            return tuple(self._joined(kind, column) for column in columns)
        if self.way == "own":
            for own, column in zip(natural, columns, strict=True):
                rows = own.dim() > 0 and not all(close(column[0], other) for other in column)
                if not _is_own(own, column):
                    many = rows and own.numel() == sum(other.numel() for other in column)
                    mixed = many and (self.divided - {kind} or _same_rows(own, column))
                    what = f"the script's own data ({kind}) are not those of the ranks together{_places(own, column)}"
                    raise Unmatched(f"on one rank {what}{_MIXED if mixed else ''}", "mixed_rows" if mixed else "other")
                self.divided.update([kind] if rows else [])
            return natural
        wanted = tuple(
            own if self._computed(own, column) else self._joined(kind, column)
            for own, column in zip(natural, columns, strict=True)
        )
        return self._replaced(kind, natural, wanted)

    def _computed(self, own: Tensor, column: Sequence[Tensor]) -> bool:
        """Return whether what the script has computed by itself, of the rows that it was given, is to be used."""
        if not own.dim():
            return _is_total(own, column) or not self.material.scalars
        return _differ_in_padding(own, column)

    def drawn(self, number: int, natural: Tensor) -> Tensor:
        """Return the numbers that this data part drew, or those of all parts together: rows, noise, masks."""
        draws = self.material.draws
        if self.way not in ("whole", "part") or any(number >= len(own) for own in draws):
            return natural
        here = [own[number] for own in draws]
        if not here or not natural.dim() or any(other.shape != here[0].shape for other in here):
            return natural
        wanted = torch.cat(here) if self.way == "whole" else here[self.part]
        fits = wanted.shape[1:] == natural.shape[1:] and wanted.numel()
        return wanted.to(natural.dtype) if fits and not all(close(here[0], other) for other in here) else natural

    def _replaced(self, kind: str, natural: Tensors, wanted: Tensors) -> Tensors:
        if natural and all(close(own, other) for own, other in zip(natural, wanted, strict=True)):
            return natural
        if natural:
            self.tell(
                f"on one rank, {_NOUNS.get(kind, 'batches of a data loader')} were replaced by those of the ranks"
            )
        return tuple(
            other.to(own.dtype) if own.is_floating_point() else other.clone()
            for own, other in zip(natural or wanted, wanted, strict=True)
        )

    def _joined(self, kind: str, column: Sequence[Tensor]) -> Tensor:
        """Return the rows of all parts together; a tensor that has no rows and is the same for all, as it is."""
        first = column[0]
        same = all(close(first, other) for other in column[1:])
        if same and (first.dim() == 0 or len(column) == 1 or len(first) not in self._rows):
            return first
        if first.dim() == 0:
            self.tell("numbers of the data parts (counts of rows or labels) were added up")
            return torch.stack(list(column)).sum().to(first.dtype)
        longest = _longest(column)
        if longest is None:
            raise Unmatched(f"the ranks' data ({kind}) of shape {list(first.shape)} cannot be put together")
        if any(other.shape[1:] != first.shape[1:] for other in column):
            self.tell("rows of the data parts were padded to one length, to be put together")
        return torch.cat([_padded(other, longest, _filled_up_with(column)) for other in column])

    @cached_property
    def _rows(self) -> set[int]:
        """Return the sizes of dim 0 of what differs between data parts."""
        found: set[int] = set()
        first, *others = self.material.parts
        for kind, events in first.items():
            for index, tensors in enumerate(events):
                for position, tensor in enumerate(tensors):
                    there = [o[kind][index][position] for o in others if kind in o and index < len(o[kind])]
                    if tensor.dim() and any(not close(tensor, other) for other in there):
                        found.add(len(tensor))
        return found

    def start(self, state: Mapping[str, Tensor]) -> None:
        """Give parameters the values that they have on the ranks, as far as those are whole."""
        for name, parameter in state.items():
            values = self.material.start.get(name)
            if values is None or values.shape != parameter.shape:
                continue  # cut by hand: if at all, it is matched by the values that it has on one rank
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(local.detach(), values.to(local.dtype)):
                self.tell("on one rank, parameters start from other values: they were given those of the ranks")
                put(parameter, values)

    def started(self, state: Mapping[str, Tensor]) -> None:
        """Check that tensors which the script has used by now started from the values of the ranks."""
        for name, tensor in state.items():
            values = self.material.start.get(name)
            if values is not None and values.shape == tensor.shape and not torch.equal(local_value(tensor), values):
                raise Unmatched(
                    f"on one rank, {name} starts from other values than on the ranks, outside of any module"
                )

    def before_step(self, number: int, optimizer: Optimizer) -> None:
        """Give the optimizer the settings of the ranks."""
        groups: list[dict[str, Any]] = optimizer.param_groups
        for group, settings in zip(groups, self.material.settings[number], strict=False):
            for name, value in settings_of(group).items():
                if name in settings and settings[name] != value:
                    self.tell(f"on one rank, the optimizer's {name} is another number: it was that of the ranks")
                    group[name] = torch.tensor(settings[name]) if isinstance(group[name], Tensor) else settings[name]

    def after_step(self, number: int, taken: Mapping[str, int]) -> None:
        """Check that as much data came in as on the ranks, by the end of this step. Raises Unmatched."""
        times = len(self.material.parts) if self.way == "turns" else 1
        there = {kind: times * count for kind, count in self.material.taken[number].items()}
        for kind in sorted({*there, *taken}):
            if there.get(kind, 0) != taken.get(kind, 0) and not kind.startswith("batch"):
                noun = _NOUNS.get(kind, kind)
                raise Unmatched(
                    f"before step {number} the script on one rank took {taken.get(kind, 0)} times {noun}, and "
                    f"{there.get(kind, 0)} were expected of what the ranks took"
                )

    def after_backward(self, parameters: Sequence[Tensor]) -> None:
        """Make the gradients the mean over all data parts."""
        if self.add_up is None:
            return
        present = torch.tensor([0.0 if p.grad is None else 1.0 for p in parameters])
        self.add_up(present)
        count = len(self.material.parts)
        for parameter, have in zip(parameters, present.tolist(), strict=True):
            if not have:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            mean = local.detach().contiguous()
            self.add_up(mean)
            with torch.no_grad():
                local.copy_(mean / count)

    def send(self, buffers: Sequence[Tensor]) -> None:
        """Give every data part the buffers of the first one, as DDP does before a forward pass."""
        if self.add_up is None:
            return
        for buffer in buffers:
            value = buffer.detach() if buffer.is_floating_point() or buffer.is_complex() else buffer.long()
            value = torch.zeros_like(value) if self.part else value.clone()
            self.add_up(value)
            with torch.no_grad():
                buffer.copy_(value)


_NOUNS = {"input": "inputs of the model", "target": "targets of the loss"}


def _is_own(own: Tensor, column: Sequence[Tensor]) -> bool:
    """Return whether the script's own tensor is that of every part, or has the elements of all of them."""
    if all(close(own, other) for other in column):
        return True
    if _is_total(own, column) or _same_elements(own, torch.cat([other.reshape(-1) for other in column])):
        return True
    return _differ_in_padding(own, column)


# Rows of several lengths: a script pads the rows of a batch to the longest of them, which is another one on each rank.


def _differ_in_padding(own: Tensor, column: Sequence[Tensor]) -> bool:
    """Return whether a tensor has the elements of all parts, and more of one value: 0 among numbers with fractions. Its
    rows have several lengths, or were of several lengths when they were flattened."""
    if (
        any(other.dim() != own.dim() or other.dtype != own.dtype for other in column)
        or own.is_complex()
        or not own.dim()
    ):
        return False
    joined = torch.cat([other.reshape(-1) for other in column])
    values, places = torch.unique(torch.cat([own.reshape(-1), joined]), return_inverse=True)
    more = places[: own.numel()].bincount(minlength=len(values)) - places[own.numel() :].bincount(minlength=len(values))
    differing = more.nonzero().flatten()
    padded = len(differing) == 1 and int(more.sum()) > 0
    return padded and (not own.is_floating_point() or float(values[differing]) == 0)


def _longest(column: Sequence[Tensor]) -> int | None:
    """Return the length of dim 1 to which all can be padded, 0 for tensors of one dim; None where other dims differ."""
    if any(not other.dim() or other.shape[2:] != column[0].shape[2:] for other in column):
        return None
    if len({other.dim() for other in column}) > 1:
        return None
    return max(other.shape[1] if other.dim() > 1 else 0 for other in column)


def _padded(tensor: Tensor, length: int, filled: float) -> Tensor:
    """Return the rows at one length."""
    more = length - tensor.shape[1] if tensor.dim() > 1 else 0
    if more == 0:
        return tensor
    return torch.cat([tensor, tensor.new_full((len(tensor), more, *tensor.shape[2:]), filled)], 1)


def _filled_up_with(column: Sequence[Tensor]) -> float:
    """Return the value with which rows seem to be padded: 0 in a mask of 0 and 1, else the one at the ends of rows that
    stands there most often, one after the other."""
    if column[0].dim() < 2 or all(bool(((t == 0) | (t == 1)).all()) for t in column):
        return 0
    ends: dict[float, int] = {}
    for row in (row.reshape(-1) for tensor in column for row in tensor if row.numel()):
        same = (row.flip(0) == row[-1]).long().cumprod(0).sum()
        ends[row[-1].item()] = ends.get(row[-1].item(), 0) + int(same) - 1
    return max(ends, key=lambda value: ends[value], default=0)


def _places(own: Tensor, column: Sequence[Tensor]) -> str:
    """Say where every rank has the first of the script's own numbers: positions that do not know the rank's place."""
    first = column[0]
    if own.is_floating_point() or own.dim() != first.dim() or not all(close(first, other) for other in column):
        return ""
    starts = all(here <= there for here, there in zip(first.shape, own.shape, strict=True))
    if not starts or not torch.equal(own[tuple(map(slice, first.shape))], first.to(own.dtype)):
        return ""
    shapes = f"{list(first.shape)} of {list(own.shape)}"
    return f": every rank has the first {shapes}, as positions have that do not begin at the rank's place"


def _is_total(own: Tensor, column: Sequence[Tensor]) -> bool:
    """Return whether it is a count, and that of all parts together."""
    if own.dim() or any(other.dim() for other in column) or len(column) == 1:
        return False
    different = any(not close(own, other) for other in column)  # else each part has that of the whole
    return different and close(own.double(), torch.stack([other.double() for other in column]).sum())


def _same_rows(own: Tensor, column: Sequence[Tensor]) -> bool:
    """Return whether each row of the parts is one of the script's own. Single whole numbers are by chance."""
    if any(other.shape[1:] != own.shape[1:] for other in column):
        return False
    rows, joined = (t.reshape(len(t), -1).tolist() for t in (own, torch.cat(list(column))))
    known = set(map(tuple, rows))
    return (own.is_floating_point() or own.shape[1:].numel() > 3) and all(tuple(row) in known for row in joined)


def _same_elements(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    if one.dtype == torch.bool:
        return int(one.sum()) == int(other.sum())
    return close(torch.sort(one.reshape(-1)).values, torch.sort(other.to(one.dtype)).values)


def put(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter of a run on one rank the values of the whole tensor."""
    with torch.no_grad():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target.copy_(values.to(target.dtype).view(target.shape))

"""Replace the data among the values that a script gives to its model and its loss, once they are found there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from nnscaler.is_user_file import OURS, beside
from nnscaler.runtime.nested_values import map_tensors, tensors_in
from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND, difference, is_whole
from nnscaler.tracing.float64_run import without_drop
from verify.external.parameter_mapping import local_value
from verify.external.ranks.call_sites import place_of_call
from verify.external.torchrun.cuda_on_cpu import Tell, without_gpu
from verify.external.torchrun.watched_script_record import ReadNumber, Settings, Tensors
from verify.external.unequal_label_counts import ignore_some

Take = Callable[[str, Tensors], Tensors]  # kind of event, and what came in -> what is to be used
_READS: frozenset[Any] = frozenset((Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.tolist))
_OF_MODEL = "_nnscaler_of_model"  # marks a tensor without a graph that a model had a part in; its value: in which step
_OF_GRADIENTS = "_nnscaler_of_gradients"  # marks what a script computes of gradients that it reads
_OF_RANKS = "_nnscaler_of_ranks"  # marks what may be a grid of all ranks, and what a script computes of it alone
_NORMS = frozenset(
    ("norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm", "square", "pow", "__pow__", "dot", "sum", "max",
     "amax", "clamp", "clamp_", "clip", "clip_", "_foreach_clamp_max_", "_foreach_clamp_min_")
)  # fmt: skip
_KEEPING = frozenset(("lerp_", "add_", "copy_", "_foreach_lerp_", "_foreach_add_", "_foreach_copy_"))
_BESIDE = (
    "the script takes parameters into tensors beside its modules ({}), as averages of the weights are: they were not "
    "compared; those of a module, as `torch.optim.swa_utils.AveragedModel` is, would be"
)
_FILLING = (
    "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "gather", "reduce_scatter",
    "reduce_scatter_tensor", "scatter",
)  # fmt: skip
_OVERWRITING = frozenset(("copy_", "set_", "__setitem__"))
# code that is no script's
_OTHERS = (beside(torch.__file__), *OURS)
# of numbers; torch.randperm draws an order in which data are taken, and is no row of them
_ENTROPIES = (nn.functional.cross_entropy, nn.functional.nll_loss)
_DRAWS: frozenset[Any] = frozenset(
    (torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint, torch.randint_like, torch.normal,
     torch.bernoulli)
)  # fmt: skip


def is_data(value: Any) -> bool:
    """Return whether a value is a tensor with numbers that no parameter had a part in."""
    plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return plain and not value.requires_grad and not value.is_meta


def exchanged(value: Any, kind: str, take: Take) -> Any:
    """Return a nested value with each tensor of data in it replaced by what `take` says of all of them together.

    Where nothing is replaced, the value itself is returned.
    """
    found = [tensor for tensor in tensors_in(value) if is_data(tensor)]
    if not found:
        return value
    local = tuple(local_value(tensor) for tensor in found)
    taken = take(kind, local)
    if all(one is other for one, other in zip(taken, local, strict=True)):
        return value
    made = iter([_like(new, old) for new, old in zip(taken, found, strict=True)])
    return map_tensors(value, lambda tensor: next(made) if is_data(tensor) else tensor)


def _like(value: Tensor, old: Tensor) -> Tensor:
    if isinstance(old, DTensor):
        return DTensor.from_local(value, old.device_mesh, old.placements, run_check=False)
    return value


class ScriptMode(TorchFunctionMode):
    """While open, functions of torch that a script calls compute on the CPU and drop nothing (unless asked). What it
    computes of a model's output and other data is told: targets, masks and counts, as events of the kind "target"; so
    are the random numbers that it draws for itself.

    dropped  a function was kept from dropping something
    numbers  of Python that the script reads from tensors that no model had a part in, such as counts of labels, in
             order; some of them say where a rank stands in a grid of all
    measured the script takes a norm of gradients in code of its own, or limits them
    ignored  each `ignore_index` of a cross entropy
    """

    def __init__(
        self,
        tell: Tell,
        outside: Callable[[], bool],
        own: Callable[[], bool],
        take: Take,
        draw: Callable[[Tensor], Tensor],
        dropout: bool,
    ) -> None:
        super().__init__()
        self.dropped = False
        self.numbers: list[ReadNumber] = []
        self.measured = False
        self.ignored: dict[int, None] = {}
        self._gradients: set[int] = set()  # where those lie that the script reads
        self._kept: list[tuple[Tensor, str]] = []
        self._steps = 0
        self._own = own  # code of the script, gradients on or off
        self._draw = draw
        self._dropout = dropout
        self._tell = tell
        self._outside = outside  # of models and backward passes, with gradients on
        self._take = take

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, named = list(args), dict(kwargs or {})
        there = without_gpu(func, given, named, self._tell)
        if there is not None:
            return there
        if not self._dropout and without_drop(func, given, named):
            self.dropped = True
        if self._outside() and func.__name__ not in ("__get__", "__set__"):
            read = given[1:] if func.__name__ in _OVERWRITING else given  # nobody reads what is written over
            if _meets_data(read, named):
                read, named = exchanged([read, named], "target", self._take)
                given = [*given[: len(given) - len(read)], *read]
        if func in _ENTROPIES:
            self.ignored[named.get("ignore_index", given[4] if len(given) > 4 else -100)] = None
        made = func(*given, **named)
        caller = sys._getframe(1).f_code.co_filename
        if not caller.startswith(_OTHERS):
            self._keep(func, given)
        self._follow_gradients(func, given, named, made, caller)
        self._follow(func, given, named, made, caller)
        return self._draw(made) if func in _DRAWS and self._outside() and is_data(made) else made

    def forget_gradients(self) -> None:
        """Note that the gradients are used up: other tensors may lie in their place from now on."""
        self._gradients.clear()
        self._steps += 1

    def note_of_kept(self, held: Iterable[Tensor]) -> str | None:
        """Return a note where the script takes parameters into tensors that it keeps from step to step, and that are
        none of those that are held."""
        known = {_storage(tensor) for tensor in held}
        place = next((place for tensor, place in self._kept if _storage(tensor) not in known), None)
        return None if place is None else _BESIDE.format(Path(place).name)

    def _keep(self, func: Callable[..., Any], given: Sequence[Any]) -> None:
        """Note what the script takes parameters into, if that was there before the last step, as averages are."""
        if func.__name__ not in _KEEPING or len(given) < 2 or not self._own():
            return
        into, taken = (value if isinstance(value, tuple | list) else (value,) for value in given[:2])
        for one, other in zip(into, taken, strict=False):
            made = getattr(one, _OF_MODEL, self._steps)  # the step in which a model had a part in it
            of_model = isinstance(other, Tensor) and (other.requires_grad or hasattr(other, _OF_MODEL))
            kept = made < self._steps and one.dim() > 0 and one.shape == other.shape and not one.requires_grad
            if kept and of_model and not self._of_gradients(other) and all(one is not old for old, _ in self._kept):
                self._kept.append((one, place_of_call() or ""))

    def _follow_gradients(
        self, func: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any], made: Any, caller: str
    ) -> None:
        """Note what the script makes of gradients that it reads, in its hooks too, and whether it measures them, by
        functions of torch as well."""
        script = not caller.startswith(_OTHERS)
        if getattr(func, "__self__", None) is Tensor.grad:
            self._gradients |= {_storage(made)} if script and isinstance(made, Tensor) else set()
        elif caller.startswith(OURS) or not (script or self._own()):
            return
        elif any(isinstance(value, Tensor) and self._of_gradients(value) for value in _values(given, named)):
            self.measured |= func.__name__ in _NORMS
            filled = given[0] if func.__name__ == "__setitem__" else named.get("out")
            for one in (*(made if isinstance(made, tuple | list) else (made,)), filled):
                if isinstance(one, Tensor):
                    setattr(one, _OF_GRADIENTS, True)
                    if any(one is written for written in (filled, *given[:1])):
                        self._gradients.add(_storage(one))

    def collectives(self) -> list[tuple[Any, str, Any]]:
        """Return what stands for collectives of torch that fill tensors: with gradients, where they are given some."""
        return [
            (owner, name, self._filling(getattr(owner, name)))
            for owner in (dist, dist.distributed_c10d)
            for name in _FILLING
            if hasattr(owner, name)
        ]

    def _filling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            tensors = [value for value in _values(args, named) if isinstance(value, Tensor)]
            if any(map(self._of_gradients, tensors)):
                self._gradients |= set(map(_storage, tensors))
            return function(*args, **named)

        return called

    def _of_gradients(self, tensor: Tensor) -> bool:
        return hasattr(tensor, _OF_GRADIENTS) or bool(self._gradients and _storage(tensor) in self._gradients)

    def _follow(
        self, func: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any], made: Any, caller: str
    ) -> None:
        """Note the number that a function reads from data, or what it makes of tensors that a model had a part in."""
        tensors = [value for value in _values(given, named) if isinstance(value, Tensor)]
        ranks = func is torch.arange and made.numel() == int(os.environ.get("WORLD_SIZE", "0"))
        of_ranks = ranks or (bool(tensors) and all(hasattr(tensor, _OF_RANKS) for tensor in tensors))
        for one in tensors_in(made) if of_ranks else ():
            setattr(one, _OF_RANKS, True)
        if not any(t.requires_grad or hasattr(t, _OF_MODEL) or hasattr(t, _OF_GRADIENTS) for t in tensors):
            reads = func in _READS and tensors[0].numel() == 1 and not caller.startswith(_OTHERS)
            if reads and self._outside() and not tensors[0].is_complex():
                self.numbers.append(ReadNumber(float(tensors[0].item()), place_of_call(), of_ranks))
            return
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and not one.requires_grad and not hasattr(one, _OF_MODEL):
                setattr(one, _OF_MODEL, self._steps)  # torch swaps no tensor that something refers to weakly


def _values(given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    values = [*given, *named.values()]
    return values + [part for value in given if isinstance(value, tuple | list) for part in value]


def _storage(tensor: Tensor) -> int:
    """Return where a tensor lies in memory: what `to_local`, `detach` and views return lies there too."""
    try:
        return 0 if tensor.is_meta else local_value(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # what only wraps others, as quantised states of optimizers do, lies nowhere itself
        return 0


def _meets_data(given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a function combines what a model made with data."""
    values = _values(given, named)
    made = any(isinstance(value, Tensor) and value.grad_fn is not None for value in values)
    return made and any(is_data(value) for value in values)


def close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same data, up to the rounding of what was computed before."""
    bound = 0.0 if is_whole(one) else FLOAT64_BOUND if one.dtype == torch.float64 else 1e-5
    return not (is_whole(one) and other.is_floating_point()) and difference(one, other).relative <= bound


def varied(tensor: Tensor, part: int, number: int) -> Tensor:
    """Return data that are others in every part, and as good: the same numbers in other places, floating ones scaled.

    Part 0 keeps its own. Ids stay ids of the same vocabulary, and zeros stay zeros.
    """
    if part == 0:
        return tensor
    generator = torch.Generator().manual_seed(1000 * part + number)
    places = torch.randperm(tensor.numel(), generator=generator)
    moved = tensor.reshape(-1)[places].view(tensor.shape)
    return moved * (1 + part / 8) if tensor.is_floating_point() else moved


def ignored_in(tensor: Tensor, constants: Sequence[int]) -> tuple[int, ...]:
    """Return the values of labels that a loss may ignore: of `constants`, and the one that is negative."""
    if tensor.dim() == 0 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return ()
    negative = tensor[tensor < 0].unique().tolist()
    values = dict.fromkeys([*constants, *(negative if len(negative) == 1 else [])])
    return tuple(value for value in values if value in tensor)


def thinned(tensor: Tensor, share: float, constants: Sequence[int]) -> Tensor:
    """Return labels of which a share of those that count still counts; other tensors as they are."""
    made = tensor
    for value in ignored_in(tensor, constants) if share < 1 else ():
        made = made.clone()
        ignore_some(made, value, share)
    return made


def settings_of(group: Mapping[str, Any]) -> Settings:
    """Return the numbers that an optimizer goes by for one group of parameters: the learning rate, betas and so on."""
    found: dict[str, float | tuple[float, ...]] = {}
    for name, value in group.items():
        if isinstance(value, Tensor):
            found |= {name: float(value)} if value.numel() == 1 else {}
        elif _is_number(value) or (isinstance(value, tuple) and all(map(_is_number, value))):
            found[name] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

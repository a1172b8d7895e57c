"""Find which shards an optimizer may be given, and make groups of parameters by pattern.

An update says along which dims of a parameter it may be cut: the registry for torch's own classes, and for any other
one a test on the spot, which runs it whole and on shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.layout import Sharded, is_cut
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor
from nnscaler.training.functional_optimizer import (
    SIZES,
    OptimizerClass,
    check_class,
    optimizer_name,
    refusal,
)
from nnscaler.training.optimizer_cut_trials import UpdateTrial, further_trials


@dataclass(frozen=True, slots=True)
class UpdateSplit:
    """Along which dims of a parameter an update may be cut.

    optimizer  its name
    free       number of a parameter's dims -> those that may be cut
    refused    number of dims -> what the optimizer says of such parameters
    coupled    what it does to one parameter depends on others: each rank must have all of them, whole
    known      the registry says so; else it was tested
    """

    optimizer: str
    free: Mapping[int, frozenset[int]]
    refused: Mapping[int, str] = field(default_factory=dict)
    coupled: bool = False
    known: bool = True

    @property
    def elementwise(self) -> bool:
        """Return whether every parameter may be cut along every dim."""
        return not self.coupled and all(len(dims) == ndim for ndim, dims in self.free.items())

    def may_cut(self, dim: int, ndim: int) -> bool:
        """Return whether a parameter with `ndim` dims may be cut along `dim`; of more dims than were tried, only where
        every update is elementwise."""
        return self.elementwise or (not self.coupled and dim in self.free.get(ndim, ()))

    def __str__(self) -> str:
        """`elementwise`, or along which dims a parameter may be cut: `1 dim: none; 2 dims: 0`."""
        if self.elementwise:
            return "elementwise"
        parts = [
            f"{ndim} dim{'s' if ndim > 1 else ''}: {', '.join(map(str, sorted(dims))) or 'none'}"
            for ndim, dims in sorted(self.free.items())
        ]
        return "; ".join(parts)


def split_of(cls: Any, defaults: Mapping[str, Any]) -> UpdateSplit:
    """Return along which dims the update of an optimizer may be cut: `cls(parameters, **defaults)` makes it.

    Raises NnscalerError for what is no optimizer, hyper-parameters that it does not take, and a step that needs more
    than gradients.
    """
    known = check_class(cls, defaults)
    if known is None:
        return tried_split(cls, defaults)
    name = optimizer_name(cls)
    refused = {n: said for n in range(1, len(SIZES) + 1) if (said := refusal(cls, defaults, n))}
    accepted = [n for n in range(1, len(SIZES) + 1) if n not in refused]
    return UpdateSplit(
        name, {n: frozenset(range(n)) if known == "elementwise" else frozenset() for n in accepted}, refused
    )


def tried_split(cls: OptimizerClass, defaults: Mapping[str, Any]) -> UpdateSplit:
    """Test along which dims an update may be cut: on real values, whole and in shards. One answer is kept for a class
    and its hyper-parameters. Raises as `split_of`."""
    return _tested(_OptimizerQuestion(cls, repr(sorted(defaults.items())), dict(defaults)))


@dataclass(frozen=True)
class _OptimizerQuestion:
    cls: OptimizerClass
    text: str
    defaults: Mapping[str, Any] = field(compare=False)


@cache
def _tested(question: _OptimizerQuestion) -> UpdateSplit:
    cls, defaults = question.cls, question.defaults
    assert inspect.isclass(cls)
    free: dict[int, frozenset[int]] = {}
    refused: dict[int, str] = {}
    coupled = False
    for ndim in range(1, len(SIZES) + 1):
        said = refusal(cls, defaults, ndim)
        if said:
            refused[ndim] = said
            continue
        trial = UpdateTrial(cls, defaults, SIZES[:ndim], thorough=True)
        try:
            (whole,) = trial.run([lambda t: t])
            coupled = coupled or trial.is_coupled(whole)
        except Exception as error:  # noqa: BLE001 - whatever the user's step raises on such parameters
            refused[ndim] = in_one_line(error)
            continue
        free[ndim] = frozenset(dim for dim in range(ndim) if trial.survives(whole, dim))
        for trial in further_trials(cls, defaults, ndim):
            if coupled and not free[ndim]:
                break
            try:
                (whole,) = trial.run([lambda t: t])
                coupled = coupled or trial.is_coupled(whole)
            except Exception:  # noqa: BLE001 - such values it does not take
                continue
            free[ndim] = frozenset(dim for dim in free[ndim] if trial.survives(whole, dim))
    if not free:
        message = f"the step of {optimizer_name(cls)} cannot be tried on gradients alone: {refused[2]}"
        help = (
            "an optimizer whose step() needs no closure, and reads only parameters, their gradients and its own state"
        )
        raise NnscalerError("no_update", message, help=help)
    return UpdateSplit(optimizer_name(cls), MappingProxyType(free), MappingProxyType(refused), coupled, False)


def build_optimizer(
    cls: Any,
    names: Mapping[str, Sequence[str]],
    held: Sequence[StoredTensor],
    groups: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
    untrained: Collection[str] = (),
) -> Optimizer:
    """Return an optimizer of the parameters that this rank holds, in groups by pattern (`parameter_groups`).

    Raises as `parameter_groups` and `check_update`, and what the class itself raises.
    """
    check_class(cls, defaults)
    here = {tensor.fqn: tensor for tensor in held}
    made = parameter_groups(cls, names, {fqn: tensor.tensor for fqn, tensor in here.items()}, groups, untrained)
    for group in made:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        own = [here[fqn] for fqn in group["param_names"]]
        split = check_update(cls, {**defaults, **settings}, own, complete=here.keys() >= names.keys())
        if not split.elementwise:  # of a parameter that another rank owns, this one has nothing to update
            group["param_names"] = [fqn for fqn in group["param_names"] if here[fqn].tensor.numel()]
            group["params"] = [here[fqn].tensor for fqn in group["param_names"]]
    optimizer: Optimizer = cls(made, **defaults)
    groups_checked[optimizer] = len(made)
    _name_later_groups(optimizer, {id(tensor.tensor): fqn for fqn, tensor in here.items()})
    return optimizer


def _name_later_groups(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Let a group that is added later have names as the others, without which torch takes none. `names`: by tensor."""
    held = ref(optimizer)  # which is to be freed with its state, and not when cycles are looked for

    def add_param_group(group: dict[str, Any]) -> None:
        given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        given = given if isinstance(given, set) else list(given)  # torch refuses what has no order
        if "param_names" not in group and isinstance(given, list) and all(id(one) in names for one in given):
            group = {**group, "params": given, "param_names": [names[id(one)] for one in given]}
        made = held()
        assert made is not None, "it is called"
        type(made).add_param_group(made, group)

    vars(optimizer)["add_param_group"] = add_param_group


groups_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many, the first ones, were checked


def check_group(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Iterable[StoredTensor], complete: bool
) -> UpdateSplit:
    """Check as `check_update` that an optimizer which is there already may be given these parameters in a group."""
    taken = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
    settings = {key: value for key, value in group.items() if key in taken}
    return check_update(type(optimizer), settings, parameters, complete)


def check_update(
    cls: Any, defaults: Mapping[str, Any], parameters: Iterable[StoredTensor], complete: bool = True
) -> UpdateSplit:
    """Check that the optimizer may be given these parameters as they rest; return what it allows.

    `defaults`: its hyper-parameters, those of the parameters' group included. `complete`: whether this rank has all
    parameters of the model. Raises NnscalerError for the first parameter that it must not be given.
    """
    split = split_of(cls, defaults)
    for parameter in parameters:
        ndim = len(parameter.shape)
        complete = complete and (parameter.tensor.numel() > 0 or 0 in parameter.shape)  # else another rank owns it
        if ndim in split.refused:
            message = f"{split.optimizer} does not take `{parameter.fqn}`, of shape {parameter.shape}"
            raise NnscalerError("optimizer_refused", f"{message}: {split.refused[ndim]}", help=_TWO)
        for axis, state in parameter.states.items():
            if not isinstance(state, Sharded) or not is_cut(state, parameter.sizes[axis]):
                continue
            if not split.may_cut(state.dim, ndim):
                raise _refused(split, parameter, axis, state)
    if split.coupled and not complete:
        message = f"what {split.optimizer} does to one parameter depends on others, and no rank has all of them"
        raise NnscalerError("update_needs_whole", message, help=f"a plan without pipeline stages and owners; {_OTHER}")
    return split


_OTHER = "an elementwise optimizer, such as torch.optim.AdamW, takes every layout"
_TWO = "give it the parameters that it takes, and the others to a second optimizer"


def _refused(split: UpdateSplit, parameter: StoredTensor, axis: str, state: Sharded) -> NnscalerError:
    ndim = len(parameter.shape)
    shape = " x ".join(map(str, parameter.shape))
    needs = "needs the whole parameter" if not split.free.get(ndim) else f"must not be cut along dim {state.dim}"
    if split.coupled:
        needs = "depends on all parameters, whole"
    message = (
        f"the update of {split.optimizer} {needs}, and `{parameter.fqn}` ({shape}) rests in shards: "
        f"{state} over `{axis}`"
    )
    free = [] if split.coupled else sorted(split.free.get(ndim, ()))
    if free:
        way = f"a layout at rest that cuts it along dim {' or '.join(map(str, free))}"
    else:
        way = f"a layout at rest that does not cut it over `{axis}`"
    return NnscalerError(
        "update_needs_whole",
        message,
        help=f"{way}: `owned=1` where zero=1 or zero=2 cuts it, with which it rests whole on one rank; or no `zero` "
        f"and no rest step for it over `{axis}`, and no split of the operations that read it, where they are what cuts "
        f"it; or for this one another optimizer: {_OTHER}",
    )


def parameter_groups(
    cls: Any,
    names: Mapping[str, Sequence[str]],
    here: Mapping[str, Tensor],
    groups: Mapping[str, Mapping[str, Any]],
    untrained: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the groups to make an optimizer of: one for each pattern, in order, then one for what none matches.

    names      every trainable parameter of the model, in its order, with all its names (several where it is tied)
    here       those that this rank has
    groups     pattern (as `*.bias`) -> hyper-parameters; the first that matches any name of a parameter counts
    untrained  names of the model's other parameters: a group of these alone is empty, for torch leaves alone what gets
               no gradient

    Every rank gets the same groups in the same order, some of them perhaps empty: schedulers do the same on all.
    Raises NnscalerError for a pattern without a parameter and for a hyper-parameter that the optimizer does not take.
    """
    taken: dict[str, str] = {}
    for pattern in groups:
        found = [fqn for fqn, all_names in names.items() if any(fnmatchcase(n, pattern) for n in all_names)]
        if found or not any(fnmatchcase(name, pattern) for name in untrained):
            _check_pattern(pattern, found, taken, names)
        taken.update((fqn, pattern) for fqn in found if fqn not in taken)
    for pattern, overrides in groups.items():
        _check_overrides(cls, pattern, overrides)
    rest = [fqn for fqn in names if fqn not in taken]
    made = [([fqn for fqn in names if taken.get(fqn) == pattern], overrides) for pattern, overrides in groups.items()]
    if rest or not made:
        made.append((rest, {}))
    own = [([fqn for fqn in fqns if fqn in here], overrides) for fqns, overrides in made]
    # the names are a list of their own: torch does not take pairs where another group is empty
    return [{"params": [here[n] for n in fqns], "param_names": fqns, **overrides} for fqns, overrides in own]


def _check_pattern(
    pattern: str, found: Sequence[str], taken: Mapping[str, str], names: Mapping[str, Sequence[str]]
) -> None:
    known = [name for all_names in names.values() for name in all_names]
    if not found:
        close = get_close_matches(pattern.strip("*."), known, n=4, cutoff=0.4) or known[:4]
        message = f"the parameter group {pattern!r} matches no parameter"
        raise NnscalerError("no_such_parameter", message, help=f"parameters of this model: {', '.join(close)}")
    if all(fqn in taken for fqn in found):
        earlier = ", ".join(repr(p) for p in dict.fromkeys(taken[fqn] for fqn in found))
        message = f"the parameter group {pattern!r} is empty: all that it matches is in {earlier}, which comes first"
        raise NnscalerError(
            "no_such_parameter", message, help="the first pattern that matches counts: the narrow first"
        )


def _check_overrides(cls: Any, pattern: str, overrides: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name != "params"]
    for key in overrides:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            message = f"the parameter group {pattern!r} sets {key!r}, which {optimizer_name(cls)} does not take"
            raise NnscalerError("no_such_setting", message, help=hint)

"""Records of the tensors that a rank holds between steps: for checkpoints, optimizers and checks of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nnscaler.layout import States
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT, Buffer, Parameter, Stage
from nnscaler.runtime.training.gradients.clipping import holds_first_copy


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or buffer as one rank holds it between steps.

    fqn          its first name in the model
    names        all its names
    shape        logical
    states       between steps, by axis
    sizes        of the mesh axes
    coordinates  of this rank on them
    tensor       this rank's shard; the very object that the optimizer updates
    kind         "parameter", "frozen" or "buffer"
    first        no rank before this one, and no stage before, holds the same elements
    read         an operation of the program reads it
    """

    fqn: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    states: States
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    tensor: Tensor
    kind: str
    first: bool
    read: bool = True


def stored_tensors(stages: Sequence[Stage], tied: Sequence[Sequence[str]] = ()) -> list[StoredTensor]:
    """Return what these stages of one rank hold, each tensor once, in the order of the model's stages.

    `tied`: all names of each tensor that has several.
    """
    names = {name: tuple(group) for group in tied for name in group}
    found: dict[int, StoredTensor] = {}
    for stage in stages:
        sizes, here = stage.sizes(), stage.coordinates()
        groups: tuple[tuple[str, Mapping[str, Parameter | Buffer]], ...] = (
            ("parameter", stage.parameters),
            ("frozen", stage.frozen),
            ("buffer", stage.buffers),
        )
        for kind, declared in groups:
            for attribute, description in declared.items():
                if description.fqn.startswith(INPUT_GRADIENT):
                    continue  # nothing that is kept
                tensor = getattr(stage, attribute) if kind == "buffer" else stage.at_rest[attribute]
                known = found.get(id(tensor))
                first = holds_first_copy(stage, description) or (known is not None and known.first)
                found[id(tensor)] = StoredTensor(
                    description.fqn,
                    names.get(description.fqn, (description.fqn,)),
                    tuple(description.shape),
                    {axis: state for axis, state in description.at_rest.items() if axis in sizes},
                    sizes,
                    here,
                    tensor,
                    kind,
                    first,
                    read=isinstance(description, Buffer) or description.used,
                )
    return list(found.values())


def held_by_one(entries: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return each tensor of the model once, of what several programs over the same parameters hold on a rank.

    A program that does not read a tensor may have one of its own in its place, which nothing changes: those that read
    it come first, and of them those that train it.
    """
    found: dict[str, StoredTensor] = {}
    for entry in entries:
        known = found.get(entry.fqn)
        if known is None or (entry.read, entry.kind == "parameter") > (known.read, known.kind == "parameter"):
            found[entry.fqn] = entry
    return list(found.values())


def trained_tensors(stages: Iterable[Stage]) -> dict[str, nn.Parameter]:
    """Return what these stages of one rank train, by name in the model: the first that has a tensor counts."""
    found: dict[str, nn.Parameter] = {}
    for stage in stages:
        for attribute, description in stage.parameters.items():
            if not description.fqn.startswith(INPUT_GRADIENT):
                found.setdefault(description.fqn, stage.at_rest[attribute])
    return found

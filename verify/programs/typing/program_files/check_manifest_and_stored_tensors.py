"""Check the manifest that the runtime reads beside a program's text, and the stored tensors that it starts from.

Parameters, buffers and constants are compared by the hashes that the manifest has of each. Constants and buffers are
compared with those that the model makes now as well, for they belong to the function: masks, tables, statistics. A
model's parameters may be drawn anew each time that it is built, so that for them the hashes are all there is. So it is
for the sample batch. All names of a tied tensor hold the same, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nnscaler.codegen.generate import listed
from nnscaler.ir.graph import LOSS, Graph, LogicalTensor
from nnscaler.manifest import MANIFEST, Manifest, ResultRecord, Returns, StoredTensor
from nnscaler.records_as_json import encode
from nnscaler.runtime.program.program_directory import describe_state
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.typing.program_files.rank_program_syntax import RoleText
from verify.programs.typing.stored_tensors_loss_and_results import stored_tensors
from verify.programs.typing.typed_value import Finder, Mistake
from verify.results.report import Check
from verify.results.verdict import Verdict

STATE, BATCH = "state.pt", "inputs.pt"
NAME = "parameters, buffers and constants"


def check_manifest(manifest: Manifest, roles: Sequence[RoleText], graph: Graph) -> tuple[int, list[Mistake]]:
    """Compare the manifest's entries with the text and the graph; return their number, and the mistakes.

    Entries that only describe the program (its plan, its communication) are not read when it runs, and not here.
    """
    ranks = sorted(rank for role in roles for rank in role.ranks)
    of_model = encode(listed(graph))
    right: dict[str, Any] = {
        "ranks": len(ranks),
        "returns": encode(_returns(roles, graph)),
        "roles": sorted((role.file, sorted(role.ranks)) for role in roles),
        "micro_batches": max((stage.micro_batches for role in roles for stage in role.stages), default=1),
        **of_model,
    }
    found = {
        "ranks": manifest.ranks,
        "returns": encode(manifest.returns),
        "roles": sorted((role.file, sorted(role.ranks)) for role in manifest.roles),
        "micro_batches": manifest.micro_batches,
        **{name: encode(getattr(manifest, name)) for name in of_model},
    }
    cause = "the runtime reads the manifest: which rank runs which file, and which batch and parameters they are for"
    wrong = []
    for name in (name for name in right if found[name] != right[name]):
        at, here, there = _first_difference(name, found[name], right[name])
        message = f"{MANIFEST} has {at} {_short(here)}, and {_source(name)} {_short(there)}"
        wrong.append(Mistake("record_differs", message, cause))
    return len(right), wrong


def _first_difference(at: str, found: Any, right: Any) -> tuple[str, Any, Any]:
    """Return where two entries first differ, as `parameters[2].dtype`, and what is there in each: whole entries may
    be long, and alike as far as they are shown."""
    if isinstance(found, dict) and isinstance(right, dict) and found.keys() == right.keys():
        name = next(name for name in found if found[name] != right[name])
        return _first_difference(f"{at}.{name}", found[name], right[name])
    if isinstance(found, list) and isinstance(right, list) and len(found) != len(right):
        return at, f"of length {len(found)}", f"length {len(right)}"
    if isinstance(found, list) and isinstance(right, list):
        place = next(i for i, (here, there) in enumerate(zip(found, right, strict=True)) if here != there)
        return _first_difference(f"{at}[{place}]", found[place], right[place])
    return at, found, right


def _returns(roles: Sequence[RoleText], graph: Graph) -> Returns:
    """Return what the model returns, with the ranks of the stage that makes each result by the text."""
    ranks: dict[str, tuple[int, ...]] = {}
    for stage in (stage for role in roles for stage in role.stages):
        names = [*([LOSS] if stage.loss is not None else []), *(result.name for result in stage.results)]
        ranks.update(dict.fromkeys(names, stage.ranks))
    results = (
        ResultRecord(name, graph.tensors[tensor].shape, graph.result_dtype(name, tensor), ranks.get(name, ()))
        for name, tensor in graph.results
    )
    return Returns(graph.structure, tuple(results))


def _source(name: str) -> str:
    return "the role programs are for" if name in ("ranks", "roles", "micro_batches") else "the model has"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


@dataclass(frozen=True)
class Stored:
    """The tensors of a program's folder, and what they should be.

    recorded     the manifest's entries, by name
    state        the tensors
    own          the model's tensors, as traced
    own_weights  the user replaced the weights
    replaceable  names in a state dict of the model, the only ones that the user may replace
    """

    recorded: Mapping[str, StoredTensor]
    state: Mapping[str, Tensor]
    own: Mapping[str, Tensor] = field(default_factory=dict)
    own_weights: bool = False
    replaceable: Collection[str] = ()

    @property
    def unhashed(self) -> frozenset[str]:
        """Names of which nobody knows the values: the program was compiled without data, and the model has none."""
        if self.own_weights:
            return frozenset()
        named = {name for name, entry in self.recorded.items() if entry.sha256 is None}
        return frozenset(name for name in named if name not in self.own or self.own[name].is_meta)


def check_state(stored: Stored, graph: Graph, folder: str = "") -> CheckOutcome:
    """Compare every stored tensor with the manifest's record, and constants and buffers with the model's own.

    Those of a model without data have no hash: their names, shapes and dtypes are compared, and they are not counted.
    """
    finder = Finder(graph, folder, {})
    known = stored_tensors(graph)
    found = describe_state(stored.state)
    wrong = list(_mistakes(stored, known, found))
    told = {mistake.tensor for mistake in wrong}
    for mistake in (*wrong, *(mistake for mistake in _untied(graph, found) if mistake.tensor not in told)):
        finder.add(STATE, 0, mistake)
    count = len({*known, *stored.recorded, *stored.state} - stored.unhashed)
    verdict = Verdict.REFUTED if finder.count else Verdict.TESTED_EXACT
    detail = "weights are the user's own: names, shapes and dtypes agree" if stored.own_weights else ""
    check = Check(NAME, verdict, count, finder.count, detail=detail, supporting=True)
    return finder.outcome(check)


def check_batch(
    recorded: Mapping[str, StoredTensor], batch: Mapping[str, Tensor], graph: Graph, folder: str = ""
) -> CheckOutcome:
    """Compare the sample batch, on which the launcher trains, with the manifest's record of it."""
    finder = Finder(graph, folder, {})
    found = describe_state(batch)
    for name in sorted({*recorded, *found}):
        if found.get(name) != recorded.get(name):
            message = f"`{name}` in {BATCH} is not the one that the program was compiled with"
            finder.add(BATCH, 0, Mistake("record_differs", message, "the launcher trains on this batch"))
    inputs = {tensor.name: tensor for tensor in graph.tensors.values() if tensor.role == "input"}
    for name, tensor in inputs.items():
        entry = recorded.get(name)
        if entry is None or (entry.dtype, tuple(entry.shape)) != (tensor.dtype, tuple(tensor.shape)):
            here = "nothing" if entry is None else f"{entry.dtype}{list(entry.shape)}"
            message = f"{MANIFEST} has {here} for the input `{name}`, which is {tensor.dtype}{list(tensor.shape)}"
            finder.add(BATCH, 0, Mistake("record_differs", message, "the launcher trains on this batch", name))
    verdict = Verdict.REFUTED if finder.count else Verdict.TESTED_EXACT
    check = Check("sample batch", verdict, len({*recorded, *found, *inputs}), finder.count, supporting=True)
    return finder.outcome(check)


def _untied(graph: Graph, found: Mapping[str, StoredTensor]) -> Iterator[Mistake]:
    """Find names of one tensor that hold different values, also where the user wrote them: ranks read
    one of the names."""
    for tensor in graph.with_role("parameter", "buffer", "constant"):
        held = [name for name in tensor.fqns if name in found]
        other = next((name for name in held if found[name] != found[held[0]]), None)
        if other is not None:
            message = f"`{held[0]}` and `{other}` in {STATE} differ, and in the model they are one tensor"
            yield Mistake("state_differs", message, "ranks read one of the names, and the other is lost", tensor.name)


def _mistakes(
    stored: Stored, known: Mapping[str, LogicalTensor], found: Mapping[str, StoredTensor]
) -> Iterator[Mistake]:
    moved = {n: e.sha256 for n, e in stored.recorded.items() if n not in found or found[n].sha256 != e.sha256}
    was = {str(digest): name for name, digest in moved.items()}
    for name in sorted({*known, *stored.recorded, *found}):
        tensor = known.get(name)
        about = None if tensor is None else tensor.name
        if name not in found:
            yield Mistake("state_differs", f"{STATE} lacks `{name}`", "the program cannot start", about)
        elif tensor is None:
            if not stored.own_weights:
                message = f"{STATE} has a tensor `{name}`, and the model has none of that name"
                yield Mistake("state_differs", message, "nothing reads it")
        elif (found[name].dtype, found[name].shape) != (rests := tensor.master or tensor.dtype, tensor.shape):
            here = f"{found[name].dtype}{list(found[name].shape)}"
            message = f"`{name}` in {STATE} is {here}, and the model's is {rests}{list(tensor.shape)}"
            yield Mistake("state_differs", message, None, about)
        else:
            mistake = _other_values(name, tensor, stored, found[name], was)
            if mistake is not None:
                yield mistake


def _other_values(
    name: str, tensor: LogicalTensor, stored: Stored, found: StoredTensor, was: Mapping[str, str]
) -> Mistake | None:
    replaced = stored.own_weights and tensor.role != "constant" and name in stored.replaceable
    right = stored.recorded.get(name)
    if right is not None and (right.dtype, right.shape) != (found.dtype, found.shape):
        here, there = (f"{entry.dtype}{list(entry.shape)}" for entry in (right, found))
        message = f"{MANIFEST} has `{name}` as {here}, and {STATE} has {there}"
        return Mistake("record_differs", message, "the program cannot start", tensor.name)
    if replaced:
        return None
    if right is None:
        return Mistake(
            "record_differs", f"{MANIFEST} has no hash of `{name}`", "its values cannot be checked", tensor.name
        )
    if name in stored.unhashed:
        return None
    if right.sha256 is None:
        message = f"{MANIFEST} has no hash of `{name}`, and the model has values of it"
        return Mistake("record_differs", message, "its values cannot be checked", tensor.name)
    if right.sha256 != found.sha256:
        other = was.get(str(found.sha256))
        cause = "its values were changed after the program was compiled"
        if other is not None:
            cause = f"it holds the values that `{other}` was compiled with"
        message = f"the {tensor.role} `{name}` in {STATE} is not the one that the program was compiled with"
        return Mistake("state_differs", message, cause, tensor.name)
    own = stored.own.get(name)
    if tensor.role == "parameter" or own is None or own.is_meta or same_bits(own.detach().cpu(), stored.state[name]):
        return None
    message = f"the {tensor.role} `{name}` of the program is not the one that the model has now"
    return Mistake(
        "state_differs", message, "the model was changed since, or it was built with another seed", tensor.name
    )

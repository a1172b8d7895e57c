"""Every finding code with the sentence that explains it. A finding with another code is a bug of ours (tested).

Each has a page too, `verify/explanations/<code>.md`: `# <code>`, the sentence, what it means, an example, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PAGES = Path(__file__).parent / "explanations"

CODES: Mapping[str, str] = MappingProxyType(
    {
        # verify-plan: the text of the program
        "layouts_disagree": "An operation or a message of the program is given a layout that it does not take.",
        "operation_differs": "A line of the program computes something else than the model's line.",
        "gradient_reduced_wrongly": "A gradient is not summed exactly once over exactly the copies of its parameter.",
        "not_covered": "Part of a tensor is held or computed by no rank, or by more ranks than it should be.",
        "random_numbers_differ": "Ranks that must draw the same random numbers do not, or ranks that must not do.",
        "precision_lost": "A line of the program rounds a tensor to a narrower dtype, and the model does not.",
        "record_differs": "The manifest beside the program says something else than the program's text or the model.",
        "state_differs": "A stored parameter, buffer or constant is not the one that the program was compiled with.",
        "program_unreadable": "The program has a line that a rank program never has, so nothing can be proved of it.",
        # verify-plan: values
        "loss_differs": "The program's loss is not the model's.",
        "gradient_differs": "The gradient of a parameter, put together from its shards, is not the model's.",
        "gradient_missing": "The model has a gradient for this parameter and the program has none.",
        "gradient_extra": "The program has a gradient for a parameter that has none in the model.",
        "parameter_differs": "A parameter is not the model's after the optimizer's steps, although gradients agree.",
        "buffer_differs": "A buffer is not the model's after the steps.",
        "replicas_differ": "Ranks that hold copies of the same values hold different ones (bitwise).",
        "parameter_not_held": "No rank holds this parameter or buffer of the model.",
        "parameter_unknown": "The program holds a parameter that the model does not have.",
        "not_finite": "The program computes NaN or infinity where the model does not.",
        "loss_missing": "No rank of the program returns a loss.",
        "gradient_norm_differs": "The norm of all gradients, to which they are clipped, is not the model's.",
        "loss_scale_matters": "A gradient is not the same once the scale of the loss is divided out.",
        "forward_only_differs": "The program's loss without backward is not the model's.",
        "checkpoint_differs": "A checkpoint lacks a tensor, or training that goes on from it computes something else.",
        "tensor_differs": "A tensor of the program that differs from the model's while its inputs agree.",
        "tensor_gradient_differs": "A tensor of the program whose gradient differs while later gradients agree.",
        # verify-plan: behaviour
        "communication_mismatch": "Ranks call collectives that do not match: kind, order, shape, dtype or group.",
        "deadlock": "Every rank that still runs waits for another one.",
        "rank_raises": "A rank of the program raises an error where the model does not.",
        "rank_died": "A rank's process ended without a result.",
        "timed_out": "Ranks were still computing when the time was up.",
        "reference_not_finite": "The model itself computes NaN or infinity on the sample: nothing can be compared.",
        "near_threshold": "The difference is neither clearly rounding nor clearly an error.",
        "random_numbers_unmatched": "The model's random draws are not those of its graph, one to one.",
        "nothing_checked": "There was nothing to compare.",
        # verify-op
        "annotation_wrong": "Shards computed as the annotation says do not make up what the whole operator computes.",
        "linear_set_wrong": "The operator is declared linear in tensors in which it is not.",
        "shard_raises": "The operator raises an error on a shard that the annotation makes legal.",
        "annotation_does_not_fit": "The operator does not take, or does not return, the shapes of its annotation.",
        "strides_matter": "The operator gives another result for the same values laid out otherwise in memory.",
        "claim_not_tested": "The annotation claims something that no inputs of the operator exercise.",
        "mutant_survived": "A deliberately wrong variant of the result passes as well: the inputs show too little.",
        "gradient_is_not_derivative": "The operator's own backward is not the derivative of its forward.",
        "input_mutated": "The operator changes a tensor that it is given.",
        "not_repeatable": "Two runs of the operator on the same inputs differ, without drawing from torch.",
        "output_dtype_wrong": "An output's dtype depends on something else than the dtypes of the inputs.",
        "operator_died": "The process that ran the operator ended without a result.",
        "operator_timed_out": "The operator was still running when the time was up.",
        "opcheck_failed": "One of the four tests of torch.library.opcheck fails on the operator.",
        "uninformative": "The operator computes NaN, infinity or only zeros on every input tried.",
        "random_operator": "The operator draws random numbers, so that its shards cannot be compared with the whole.",
        # gate
        "not_run": "An item of the gate was not run, or only in part: the time was up, or somebody interrupted it.",
        "could_not_run": "An item of the gate could not be run: its model, plan, operator or settings are at fault.",
        "internal_error": "nnScaler itself failed on an item of the gate.",
        "item_died": "The process that ran an item of the gate ended without a result.",
        "item_timed_out": "An item of the gate was still running when its own time was up.",
        "baseline_expired": "A known finding of the baseline is past the date until which it may stay.",
        "baseline_stale": "The baseline does not say what is found: a known finding is gone, or comes with more.",
    }
)


def explain(code: str) -> str:
    """Return the sentence for `code`. Raises KeyError on a code that is not listed."""
    return CODES[code]


def page(code: str) -> str:
    """Return the page for `code`, in Markdown. Raises KeyError on a code that is not listed."""
    assert (PAGES / f"{code}.md").is_file() or code not in CODES, f"{code} has no page"
    if code not in CODES:
        raise KeyError(code)
    return (PAGES / f"{code}.md").read_text(encoding="utf-8")


def section(code: str, title: str) -> str:
    """Return the text under `## <title>` on the page for `code`; empty where the page has no such heading."""
    _, found, rest = page(code).partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0].strip() if found else ""

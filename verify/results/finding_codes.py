"""Every finding code: the sentence that explains it, and what it decides. Another code is a bug of ours (tested).

Each has a page too, `verify/results/explanations/<code>.md`: `# <code>`, the sentence, what it means, an example, what
to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

PAGES = Path(__file__).parent / "explanations"


@dataclass(frozen=True, slots=True)
class Code:
    """One finding code, and what it decides.

    sentence      explains it in one line
    undecided     it says that nothing could be decided, also beside something else that is refuted: it is a warning
    unfinished    something did not run, or not to its end: a baseline cannot know it, for there is nothing to know
    unmatched     a line is not the model's and may still compute the same: the text alone does not refute the program
    incomparable  a shard of the operator cannot equal the whole then: none is compared with it
    """

    sentence: str
    undecided: bool = False
    unfinished: bool = False
    unmatched: bool = False
    incomparable: bool = False


CATALOGUE: Mapping[str, Code] = MappingProxyType(
    {
        # verify-plan: the text of the program
        "layouts_disagree": Code("An operation or a message of the program is given a layout that it does not take."),
        "operation_differs": Code(
            "A line of the program computes something else than the model's line.", unmatched=True
        ),
        "gradient_reduced_wrongly": Code(
            "A gradient is not summed exactly once over exactly the copies of its parameter."
        ),
        "not_covered": Code("Part of a tensor is held or computed by no rank, or by more ranks than it should be."),
        "random_numbers_differ": Code(
            "Ranks that must draw the same random numbers do not, or ranks that must not do."
        ),
        "version_differs": Code(
            "A batch of a stream reads or updates another version of the parameters than delayed SGD does."
        ),
        "precision_lost": Code("A line of the program rounds a tensor to a narrower dtype, and the model does not."),
        "autocast_differs": Code(
            "A line of the program computes in other dtypes than the model's line: the autocast around it differs."
        ),
        "record_differs": Code(
            "The manifest beside the program, or a file that it names, is not as the text or the model has it."
        ),
        "state_differs": Code(
            "A stored parameter, buffer or constant is not the one that the program was compiled with."
        ),
        "program_unreadable": Code(
            "The program has a line that a rank program never has, so nothing can be proved of it.", unmatched=True
        ),
        # verify-plan: values
        "loss_differs": Code("The program's loss is not the model's."),
        "gradient_differs": Code("The gradient of a parameter, put together from its shards, is not the model's."),
        "gradient_missing": Code("The model has a gradient for this parameter and the program has none."),
        "gradient_extra": Code("The program has a gradient for a parameter that has none in the model."),
        "parameter_differs": Code("A parameter is not the model's after the optimizer's steps."),
        "buffer_differs": Code("A buffer is not the model's after the steps."),
        "replicas_differ": Code("Ranks that hold copies of the same values hold different ones (bitwise)."),
        "parameter_not_held": Code("No rank holds this parameter or buffer of the model."),
        "parameter_unknown": Code("The program holds a parameter that the model does not have."),
        "not_finite": Code("The program computes NaN or infinity where the model does not."),
        "loss_missing": Code("No rank of the program returns a loss."),
        "gradient_norm_differs": Code("The norm of all gradients, to which they are clipped, is not the model's."),
        "loss_scale_matters": Code("A gradient is not the same once the scale of the loss is divided out."),
        "result_differs": Code("What the program returns besides the loss is not what the model returns."),
        "forward_only_differs": Code("The program's loss without backward is not the model's."),
        "checkpoint_differs": Code(
            "A checkpoint lacks a tensor, or training that goes on from it computes something else."
        ),
        "tensor_differs": Code("A tensor of the program that differs from the model's while its inputs agree."),
        "tensor_gradient_differs": Code("A tensor of the program whose gradient differs while later gradients agree."),
        # verify-plan --train
        "learning_rate_differs": Code("The learning rate of a training step is not that of the schedule."),
        "optimizer_state_differs": Code("The optimizer's state, put together from its shards, is not the model's."),
        "optimizer_state_owner": Code("Part of the optimizer's state is with no rank, or not with those that own it."),
        "evaluation_differs": Code("The loss in evaluation mode is not the model's, or evaluation changed a buffer."),
        "training_dtype_differs": Code("Part of training is done in another dtype than that of the parameter at rest."),
        # verify-plan: behaviour
        "communication_mismatch": Code("Ranks call collectives that do not match: kind, order, shape, dtype or group."),
        "memory_under_way": Code(
            "Memory is used while a communication that was begun reads or writes it, or nothing waits for that."
        ),
        "deadlock": Code("Every rank that still runs waits for another one."),
        "rank_raises": Code("A rank of the program raises an error where the model does not."),
        "rank_died": Code("A rank's process ended without a result.", unfinished=True),
        "timed_out": Code("Ranks were still computing when the time was up.", undecided=True, unfinished=True),
        "reference_not_finite": Code(
            "The model itself computes NaN or infinity on the sample: nothing can be compared.", undecided=True
        ),
        "near_threshold": Code("The difference is neither clearly rounding nor clearly an error.", undecided=True),
        "random_numbers_unmatched": Code("The model's random draws are not those of its graph, one to one."),
        "float64_alone": Code(
            "The program differs from the model in float64, and agrees with it in float32.", undecided=True
        ),
        "nothing_checked": Code("There was nothing to compare.", undecided=True, unfinished=True),
        # verify-external
        "parameter_unmatched": Code(
            "A parameter of the program cannot be matched with the plain model: nothing is decided about it.",
            undecided=True,
        ),
        "not_compared": Code(
            "Something of the program was not compared with the model, or only where it changes nothing.",
            undecided=True,
        ),
        "same_rows": Code(
            "Ranks that average their gradients train on the same rows: they do the work of one.", undecided=True
        ),
        "checkpoint_not_tried": Code(
            "The program could not be saved or loaded, so that no checkpoint was compared.",
            undecided=True,
            unfinished=True,
        ),
        # verify-op
        "annotation_wrong": Code(
            "Shards computed as the annotation says do not make up what the whole operator computes."
        ),
        "linear_set_wrong": Code("The operator is declared linear in tensors in which it is not."),
        "shard_raises": Code("The operator raises an error on a shard that the annotation makes legal."),
        "annotation_does_not_fit": Code(
            "The operator does not take, or does not return, the shapes of its annotation."
        ),
        "strides_matter": Code("The operator gives another result for the same values laid out otherwise in memory."),
        "claim_not_tested": Code(
            "The annotation claims something that no inputs of the operator exercise.", undecided=True
        ),
        "mutant_survived": Code(
            "A deliberately wrong variant of the result passes as well: the inputs show too little.", undecided=True
        ),
        "gradient_is_not_derivative": Code("The operator's own backward is not the derivative of its forward."),
        "input_mutated": Code("The operator changes a tensor that it is given.", incomparable=True),
        "not_repeatable": Code(
            "Two runs of the operator on the same inputs differ, without drawing from torch.", incomparable=True
        ),
        "asks_ranks": Code(
            "The operator asks torch.distributed: what it computes on several ranks is not known.", undecided=True
        ),
        "output_dtype_wrong": Code("An output's dtype depends on something else than the dtypes of the inputs."),
        "operator_died": Code("The process that ran the operator ended without a result.", unfinished=True),
        "operator_timed_out": Code(
            "The operator was still running when the time was up.", undecided=True, unfinished=True
        ),
        "opcheck_failed": Code("One of the four tests of torch.library.opcheck fails on the operator."),
        "uninformative": Code(
            "The operator computes NaN, infinity or only zeros on every input tried.", undecided=True
        ),
        "random_operator": Code(
            "The operator draws random numbers, so that its shards cannot be compared with the whole.",
            undecided=True,
            incomparable=True,
        ),
        # gate
        "not_run": Code(
            "An item of the gate was not run, or only in part: the time was up, or somebody interrupted it.",
            unfinished=True,
        ),
        "could_not_run": Code(
            "An item of the gate, or one of many programs, could not be run: the fault is in what it names.",
            unfinished=True,
        ),
        "internal_error": Code(
            "nnScaler itself failed on an item of the gate, or on one of many programs.", unfinished=True
        ),
        "item_died": Code(
            "The process that ran an item of the gate, or one of many programs, ended without a result.",
            unfinished=True,
        ),
        "item_timed_out": Code(
            "An item of the gate, or one of many programs, was still running when its own time was up.", unfinished=True
        ),
        "baseline_expired": Code(
            "A known finding of the baseline is past the date until which it may stay.", unfinished=True
        ),
        "baseline_stale": Code(
            "The baseline does not say what is found: a known finding is gone, or comes with more.", unfinished=True
        ),
    }
)
CODES: Mapping[str, str] = MappingProxyType({name: code.sentence for name, code in CATALOGUE.items()})
UNDECIDED = frozenset(name for name, code in CATALOGUE.items() if code.undecided)
UNFINISHED = frozenset(name for name, code in CATALOGUE.items() if code.unfinished)
UNMATCHED = frozenset(name for name, code in CATALOGUE.items() if code.unmatched)
INCOMPARABLE = frozenset(name for name, code in CATALOGUE.items() if code.incomparable)


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

"""Programs that are right are proved, and none that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard

from tests.sampling import every
from tests.verify.external.proof.programs import TP, mutants, program, right_programs, tensor_parallel
from verify.external.proof import prove_external
from verify.external.transformers.build_program import transformers_program
from verify.external.transformers.check_parallel_degrees import PlanSizes
from verify.results.verdict import Verdict

RIGHT, WRONG = right_programs(), mutants()
REFUTED = {  # what is certain from layouts alone, and a word of what is said of it
    "no sum in the forward pass": "`native_layer_norm` reads a tensor whole",
    "no sum in the backward pass": "not summed over tp",
    "the sum of the backward pass taken twice": "2 times",
    "a layer left out (tp)": "the program has none",
    "gradients cut (tp)": "the program has none",
    "a parameter without gradient (tp)": "the program has none",
    "terms leave the attention": "`native_layer_norm` reads a tensor whole",
    "terms leave the feed-forward part": "`native_layer_norm` reads a tensor whole",
    "a norm's gradient is not summed": "not summed over tp",
    "the last norm's gradient is not summed": "not summed over tp",
    "DDP ignores a parameter": "it is not summed over dp",
    "the module of DDP is called": "it is not summed over dp",
    "gradients are not averaged": "not summed over dp",
    "gradients are summed": "2 times",
    "gradients are summed twice": "4 times",
    "gradients are averaged over tp": "not summed over dp",
    "one gradient is not averaged": "not summed over dp",
    "sharded gradients are summed": "2 times",
    "only tensor parallel": "not summed over dp",
    "the loss is scaled": "2 times",
    "the batch is not divided": "2 times",
}


@pytest.mark.parametrize("name", every(4, RIGHT))
def test_a_right_program_is_proved(name: str) -> None:
    found = prove_external(RIGHT[name])
    assert found.verdict is Verdict.PROVED_BOUNDED, found.findings
    assert found.compared == 22 and found.calls > 100 and not found.findings and found.reason is None
    parts = any(axis == "dp" for axis, _ in RIGHT[name].mesh)
    assert bool(found.conditions) == parts  # parts of a mean are equal


@pytest.mark.parametrize("name", every(6, WRONG))
def test_a_wrong_program_is_not_proved(name: str) -> None:
    found = prove_external(WRONG[name])
    assert not found.verdict.passes and found.findings
    assert (found.verdict is Verdict.REFUTED) == (name in REFUTED), found.findings
    if name in REFUTED:
        assert any(REFUTED[name] in f.message for f in found.findings)


def test_there_are_thirty_mutants() -> None:
    assert len(WRONG) >= 30 and WRONG.keys() >= REFUTED.keys()


@pytest.mark.long
def test_a_missing_sum_is_named_with_both_lines() -> None:
    (first, *_) = prove_external(WRONG["no sum in the forward pass"]).findings
    assert first.code == "layouts_disagree" and first.where is not None
    assert (
        first.where.text == 'h = F.gelu(self.up(self.norm2(x)), approximate="tanh" if faults.approximate else "none")'
    )
    ((_, made),) = first.related
    assert made.text == "x = a if faults.lonely else x + a"
    assert first.cause == "an all_reduce (or reduce_scatter) over tp is missing before it"


@pytest.mark.long
def test_layers_that_repeat_are_asked_about_once() -> None:
    one, three = (prove_external(program(tensor_parallel, TP, layers)) for layers in (2, 3))
    assert one.verdict is three.verdict is Verdict.PROVED_BOUNDED
    assert three.calls > one.calls and three.classes == one.classes


def test_hooks_of_fsdp2_are_not_traced_and_it_says_so() -> None:
    def sharded(model: nn.Module, mesh: object) -> None:
        fully_shard(model, mesh=mesh)  # type: ignore[call-overload]

    found = prove_external(program(sharded, (("dp", 2),)))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason is not None and found.reason.startswith("FSDP2's hooks move parameters outside")


def test_a_hook_in_place_of_ddps_average_is_not_traced_and_it_says_so() -> None:
    def hooked(model: nn.Module, mesh: object) -> nn.Module:
        made = nn.parallel.DistributedDataParallel(model)
        made.register_comm_hook(None, allreduce_hook)
        return made

    found = prove_external(program(hooked, (("dp", 2),)))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason is not None and found.reason.startswith("DistributedDataParallel's reducer is no operator")


def test_what_cannot_be_traced_is_inconclusive() -> None:
    def reads_values(model: nn.Module, mesh: object) -> None:
        model.register_forward_pre_hook(lambda module, given: print(float(torch.ones(2).sum() + given[0].sum())))

    found = prove_external(program(reads_values, TP))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason is not None and found.reason.startswith("the step raises on fake tensors: DataDependentOutput")


@pytest.mark.long
def test_labels_that_do_not_count_have_to_be_as_many_in_each_part() -> None:
    labels = torch.zeros(4, 8, dtype=torch.long)
    labels[0, :3] = -100
    given = RIGHT["data parallel by hooks"]
    found = prove_external(
        type(given)(**{**vars(given), "batch": lambda: (torch.zeros(4, 8, dtype=torch.long), labels)})
    )
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "as many labels" in found.findings[0].message


def test_a_mean_over_parts_is_no_whole_batch() -> None:
    given = RIGHT["data parallel by hooks"]
    found = prove_external(type(given)(**{**vars(given), "reference": "parts"}))
    assert found.verdict is Verdict.INCONCLUSIVE and found.reason is not None and "data parts" in found.reason


@pytest.mark.long
def test_a_thousand_ranks_take_no_longer_than_two() -> None:
    found = prove_external(program(tensor_parallel, (("pp", 2048), ("tp", 4))))
    assert found.verdict is Verdict.PROVED_BOUNDED and found.ranks == (0, 8191)


def test_what_parallelize_does_to_values_is_doubted() -> None:
    def scales(model: nn.Module, mesh: object) -> None:
        with torch.no_grad():
            model.head.weight.mul_(2.0)  # type: ignore[operator,union-attr]

    def exchanges(model: nn.Module, mesh: object) -> None:
        block = model.blocks[0]  # type: ignore[index]
        block.q, block.k = block.k, block.q

    def makes(model: nn.Module, mesh: object) -> None:
        model.norm = nn.LayerNorm(16)

    for parallelize, text in (
        (scales, "`parallelize` writes to `head.weight`"),
        (exchanges, "is the model's `blocks.0."),
        (makes, "is a tensor that `parallelize` makes"),
    ):
        found = prove_external(program(parallelize, TP))
        assert found.verdict is Verdict.INCONCLUSIVE
        assert any(text in f.message for f in found.findings), found.findings


def test_plans_of_transformers_are_followed_through_its_own_code() -> None:
    """The model is copied and meshes are made inside of `parallelize`; norms of heads have no rule in one of them."""
    right = prove_external(transformers_program("hf:llama", PlanSizes(tp=2), {}))
    assert right.verdict is Verdict.PROVED_BOUNDED, right.reason
    wrong = prove_external(transformers_program("hf:phi", PlanSizes(tp=2), {"qk_layernorm": True}))
    assert wrong.verdict is Verdict.REFUTED
    assert {f.code for f in wrong.findings} == {"gradient_reduced_wrongly"}

"""Scripts with a fault planted: each is refuted, with its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.external.torchrun.running import told, verified
from verify.external.torchrun.verify import verify_script
from verify.results.verdict import Verdict


@pytest.mark.parametrize(
    ("command", "ranks", "code", "cause"),
    [
        pytest.param("by_hand.py --broken reduce", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long),
        pytest.param("by_hand.py --inside --broken late", 2, "gradient_differs", "missing_reduction"),
        pytest.param("by_hand.py --broken late", 3, "gradient_differs", "missing_reduction", marks=pytest.mark.long),
        pytest.param("by_hand.py --broken group", 4, "gradient_differs", "missing_reduction", marks=pytest.mark.long),
        pytest.param("by_hand.py --broken average", 3, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param(
            "fsdp_transformer.py --broken norm", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long
        ),
        pytest.param(
            "tensor_parallel.py --broken norm", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long
        ),
        pytest.param("pipeline.py --broken scale", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param(
            "pipeline.py --traced --broken scale --layers 4", 2, "gradient_differs", "scaled", marks=pytest.mark.long
        ),
        ("pipeline.py --broken layer --layers 4", 2, "parameter_not_held", "differs"),
        pytest.param("gpt_train.py --broken=sync", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long),
        pytest.param(
            "megatron_style.py --broken copy", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long
        ),
        ("megatron_style.py --broken bias", 2, "loss_differs", "differs"),
        ("megatron_style.py --broken seed", 2, "random_numbers_differ", "random_numbers"),
        ("loops.py penalty --broken sync", 2, "gradient_differs", "missing_reduction"),
        pytest.param("loops.py two --broken sync", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long),
        pytest.param(
            "loops.py closure --broken sync", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long
        ),
        pytest.param("loops.py inside --broken sync", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        ("kept_state.py --broken temperature", 2, "gradient_differs", "missing_reduction"),
        ("by_hand.py --owned --broken sent", 2, "parameter_differs", "not_updated"),
        pytest.param(
            "by_hand.py --owned --broken reduce", 2, "gradient_differs", "missing_reduction", marks=pytest.mark.long
        ),
        ("sent_stages.py --broken half", 2, "gradient_differs", "scaled"),
        pytest.param("sent_stages.py --broken norm", 4, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param(
            "sent_stages.py --limit 99 --broken norm", 2, "gradient_differs", "scaled", marks=pytest.mark.long
        ),
        pytest.param("renumbered_stages.py --broken norm", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param(
            "renumbered_stages.py --sharded --broken norm", 4, "gradient_differs", "scaled", marks=pytest.mark.long
        ),
        pytest.param(
            "renumbered_stages.py --tied --broken tied",
            2,
            "gradient_differs",
            "missing_reduction",
            marks=pytest.mark.long,
        ),
        pytest.param("zero.py --broken divide", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        ("zero.py --alone --broken first", 2, "gradient_differs", "permuted"),
        pytest.param("zero.py --alone --broken divide", 3, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param("zero.py --broken norm", 3, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param("zero.py --alone --broken reduce", 2, "gradient_differs", "own_rows", marks=pytest.mark.long),
        pytest.param("zero.py --alone --broken gather", 2, "parameter_differs", "not_updated", marks=pytest.mark.long),
        pytest.param("copies.py --broken divide", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param("copies.py --broken biases", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param("copies.py --groups --broken divide", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param("copies.py --padded --broken divide", 2, "gradient_differs", "scaled", marks=pytest.mark.long),
        pytest.param(
            "by_hand.py --broken norm", 2, "gradient_norm_differs", "missing_reduction", marks=pytest.mark.long
        ),
        pytest.param(
            "accumulate.py --sharded --broken first", 2, "gradient_differs", "differs", marks=pytest.mark.long
        ),
        ("accumulate.py --broken clip", 2, "gradient_norm_differs", "missing_reduction"),
        ("flat_shards.py --broken clip", 2, "gradient_norm_differs", "missing_reduction"),
        pytest.param(
            "flat_shards.py --original --broken ignored",
            3,
            "gradient_differs",
            "missing_reduction",
            marks=pytest.mark.long,
        ),
        pytest.param("kept_state.py --broken weights", 2, "buffer_differs", "scaled", marks=pytest.mark.long),
    ],
)
def test_wrong(command: str, ranks: int, code: str, cause: str) -> None:
    report = verified(command, ranks)
    assert report.verdict is Verdict.REFUTED, told(report)
    found = [(finding.code, finding.counter_example.get("cause")) for finding in report.findings]
    assert (code, cause) in found, told(report)


@pytest.mark.long
def test_ranks_that_split_a_layer_and_take_in_other_data_are_named() -> None:
    report = verified("tensor_parallel.py --broken seed", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    assert all("ranks that split a layer" in str(finding.cause) for finding in report.findings), told(report)


@pytest.mark.long
def test_the_first_update_of_what_is_made_later_is_a_number() -> None:
    report = verified("loops.py resume --broken state", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    assert [finding.code for finding in report.findings] == ["parameter_differs"], told(report)
    assert "on rank 1" in report.findings[0].message and "NaN" not in str(report.findings[0].cause), told(report)


def test_only_what_is_not_reduced_is_named() -> None:
    report = verified("by_hand.py --broken late", 2)
    (finding,) = (finding for finding in report.findings if finding.code == "gradient_differs")
    assert finding.counter_example["tensors"] == "0.bias, 2.bias, 2.weight"


@pytest.mark.parametrize(
    "command", ["by_hand.py --owned --clip", pytest.param("pipeline.py --layers 4", marks=pytest.mark.long)]
)
def test_clipping_by_hand_is_tried_beyond_its_limit(command: str) -> None:
    report = verified(f"{command} --broken clip", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    assert [check.name for check in report.checks if not check.verdict.passes] == ["gradients beyond a limit"]
    assert {finding.code for finding in report.findings} == {"gradient_differs"}
    assert all("16384 times as large" in finding.message for finding in report.findings)


@pytest.mark.parametrize(
    ("broken", "tensors", "cause"),
    [
        ("late", "2.bias", "an averaging all_reduce over data is missing"),
        pytest.param("norm", "0.weight", "where no limit is reached, gradients agree", marks=pytest.mark.long),
        pytest.param("twice", "0.weight", "it is 1/2 of the model's", marks=pytest.mark.long),
    ],
)
def test_the_cause_is_found_beside_what_limits_gradients(broken: str, tensors: str, cause: str) -> None:
    report = verified(f"main_grad.py --broken {broken}", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    finding = report.findings[0]
    assert tensors in str(finding) and cause in str(finding.cause), told(report)


@pytest.mark.long
def test_a_norm_of_a_shard_that_clips_nothing_is_named(tmp_path: Path) -> None:
    """The mean over the data parts is what is not clipped: that it is the mean is no fault."""
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.REFUTED, told(report)
    assert "the gradient as it is before it is clipped" in str(report.findings[0].cause), told(report)


SHARDS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(10 + dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,))).backward()
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_(torch.clamp(0.5 / norm, max=1.0))
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("limit", "rank 0 clips by 2e+03, and one rank by 1e+03"),
        pytest.param("value", "rank 0 clips by 2e+03, and one rank by 1e+03", marks=pytest.mark.long),
        pytest.param("none", "rank 0 clips by inf, and one rank by 1e+03", marks=pytest.mark.long),
    ],
)
def test_a_limit_that_depends_on_the_number_of_ranks_is_tried_beyond_it(broken: str, words: str) -> None:
    report = verified(f"gpt_train.py --broken={broken}", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    assert [check.name for check in report.checks if not check.verdict.passes] == ["gradients beyond a limit"]
    assert all(words in finding.message for finding in report.findings), told(report)


def test_numbers_of_optimizers_that_differ_are_told() -> None:
    report = verified("by_hand.py --broken rate", 2)
    assert [finding.code for finding in report.findings] == ["parameter_differs"], told(report)
    assert "in step 0, the optimizer's lr is 0.2 on rank 1, and 0.1 on rank 0" in report.notes, told(report)


@pytest.mark.long
def test_what_differs_last_is_told_of_the_reference_that_agrees_until_then() -> None:
    """By the mean over the data parts, a loss over the labels of all ranks would be a factor too large."""
    report = verified("loops.py counts --tensor --broken decay", 2)
    assert {finding.code for finding in report.findings} == {"parameter_differs"}, told(report)
    assert all("on rank 1" in finding.message for finding in report.findings), told(report)


def test_replicas_that_nobody_made_equal() -> None:
    report = verified("by_hand.py --broken init", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    (finding,) = report.findings
    assert finding.code == "replicas_differ"
    assert "0.weight" in finding.message


def test_other_values_on_every_rank_are_named_where_they_cannot_be_matched() -> None:
    report = verified("by_hand.py --broken alone", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (finding,) = report.findings
    said = "the script on one rank is no reference for the ranks: ranks start from different values of 0.weight, 0.bias"
    assert finding.message.startswith(said), told(report)
    assert "broadcast the parameters of rank 0" in str(finding.help)


def test_statistics_of_every_data_part_are_compared() -> None:
    report = verified("accumulate.py --batch-norm --broken momentum", 2, reference="parts")
    assert [finding.code for finding in report.findings] == ["buffer_differs"], told(report)
    assert "1.running_mean, 1.running_var" in report.findings[0].message, told(report)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("by_hand.py --idle", "the gradient of 0.bias, 0.weight is zero in every step"),
        ("by_hand.py --broken rows", "(input) are not those of the ranks together, although there are as many"),
        pytest.param("by_hand.py --broken labels", "(target) are not those of the ranks", marks=pytest.mark.long),
        ("loops.py counts --tensor --broken own", "given the rows of all: loss differs"),
        pytest.param("loops.py counts --broken own", "given the rows of all: loss differs", marks=pytest.mark.long),
        ("kept_state.py --broken mean", "not with the script on one rank, given the rows of all: mean differs"),
        pytest.param(
            "kept_state.py --twice", "steps change several Model aside, which cannot be found", marks=pytest.mark.long
        ),
        pytest.param("kept_state.py --broken start", "steps change Model aside: linear.bias", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_compared_is_named(command: str, words: str) -> None:
    report = verified(command, 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    finding = report.findings[-1]
    assert finding.code == "not_compared" and words in finding.message, told(report)
    assert finding.help is not None


@pytest.mark.parametrize(
    ("command", "ranks", "same"),
    [
        ("sampler.py --broken sampler", 2, "ranks 0 and 1 take in the same rows"),
        pytest.param(
            "sampler.py --broken pairs", 4, "ranks 0 and 1, ranks 2 and 3 take in the same rows", marks=pytest.mark.long
        ),
        pytest.param(
            "sampler.py --broken sampler --evaluate", 2, "ranks 0 and 1 train on the same rows", marks=pytest.mark.long
        ),
        pytest.param("by_hand.py --broken same", 3, "ranks 0 and 1 and 2 take in", marks=pytest.mark.long),
        pytest.param(
            "sampler.py --broken seed", 2, "samplers give rows to several ranks: of the 240", marks=pytest.mark.long
        ),
        (
            "accumulate.py --broken overlap",
            2,
            "ranks take in rows of each other: what comes in on rank 0 in step 0 (batch 2) comes in on rank 1 in",
        ),
    ],
)
def test_ranks_that_do_the_work_of_one(command: str, ranks: int, same: str) -> None:
    report = verified(command, ranks)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (finding,) = report.findings
    assert finding.code == "same_rows" and finding.message.startswith(same), told(report)
    assert any(check.name == "gradients" and check.verdict.passes for check in report.checks), told(report)


def test_batch_norms_over_some_of_the_ranks_decide_nothing() -> None:
    report = verified("accumulate.py --batch-norm --sync --broken pairs", 4)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "SyncBatchNorm expected input tensor to be on GPU" in report.findings[0].message


def test_a_number_that_is_read_from_other_data_decides_nothing() -> None:
    report = verified("loops.py counts --slices", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert all("on one rank the script reads" in str(finding.cause) for finding in report.findings), told(report)
    assert verified("loops.py counts --slices --tensor", 2).verdict.passes


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("fsdp_transformer.py --same-rows --broken norm", 2),
        pytest.param("two_dimensions.py --same-rows --broken fsdp", 4, marks=pytest.mark.long),
        pytest.param("two_dimensions.py --same-rows --broken root", 4, marks=pytest.mark.long),
    ],
)
def test_a_reduction_that_equal_rows_hide_is_tried_on_others(command: str, ranks: int) -> None:
    report = verified(command, ranks)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (finding,) = report.findings
    assert finding.code == "not_compared"
    assert "an averaging all_reduce over data is missing" in finding.message, told(report)


@pytest.mark.long
def test_copies_alone_that_change_show_no_training() -> None:
    report = verified("zero.py --broken gather", 2)  # on one rank, too, the model keeps its values
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert ["the optimizer changes no parameter" in finding.message for finding in report.findings] == [True]


@pytest.mark.long
@pytest.mark.parametrize(("how", "unplaced", "count"), [("groups", 1, 2 * 2 * 3), ("padded", 4, 2 * 2 * 2)])
def test_copies_that_have_no_place_leave_gradients_open(how: str, unplaced: int, count: int) -> None:
    """Count the copies that have one, on two ranks in two steps."""
    report = verified(f"copies.py --{how}", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (check,) = (check for check in report.checks if check.name == "gradients")
    assert (check.verdict, check.count) == (Verdict.INCONCLUSIVE, count), told(report)
    (finding,) = report.findings
    assert finding.code == "not_compared" and "parameter 2 of optimizer 1" in finding.message, told(report)
    assert (" and 1 more" in finding.message) is (unplaced == 4), told(report)


@pytest.mark.long
def test_parameters_that_differ_are_not_said_to_have_gradients_that_agree_where_some_are_open() -> None:
    report = verified("copies.py --padded --broken biases", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    (message,) = (f.message for f in report.findings if f.code in ("parameter_differs", "near_threshold"))
    assert "bias" in message and "and not all gradients could be compared" in message, told(report)

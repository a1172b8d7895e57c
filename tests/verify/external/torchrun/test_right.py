"""Right scripts, unmodified, on two, three and four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.external.torchrun.running import told, verified
from verify.external.comparison.compare import LATE
from verify.external.torchrun.verify import verify_script
from verify.results.verdict import Verdict

OWN, WHOLE = "with its own data", "the rows of all data parts together"
TURNS, PART = "in turn", "on each data part by itself"


@pytest.mark.parametrize(
    ("command", "ranks", "way"),
    [
        pytest.param("ddp_toy.py", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("ddp_toy.py", 4, WHOLE, marks=pytest.mark.long),
        pytest.param("sampler.py", 2, WHOLE, marks=pytest.mark.long),
        ("sampler.py --batch-size 5", 3, WHOLE),
        ("sampler.py --evaluate", 2, WHOLE),
        pytest.param("sampler.py", 4, WHOLE, marks=pytest.mark.long),
        pytest.param("by_hand.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("by_hand.py --loss sum", 3, OWN, marks=pytest.mark.long),
        pytest.param("by_hand.py", 4, OWN, marks=pytest.mark.long),
        ("by_hand.py --inside", 2, OWN),
        ("by_hand.py --owned", 2, OWN),
        ("by_hand.py --owned --clip", 2, OWN),
        pytest.param("by_hand.py --owned", 3, OWN, marks=pytest.mark.long),
        pytest.param("fsdp_transformer.py", 2, PART, marks=pytest.mark.long),
        pytest.param("fsdp_transformer.py", 3, PART, marks=pytest.mark.long),
        pytest.param("fsdp_transformer.py --same-rows", 4, PART, marks=pytest.mark.long),
        pytest.param("fsdp_transformer.py --evaluate", 2, PART, marks=pytest.mark.long),
        ("sent_stages.py", 2, OWN),
        pytest.param("sent_stages.py", 4, OWN, marks=pytest.mark.long),
        ("zero.py", 3, WHOLE),
        pytest.param("zero.py --alone", 2, WHOLE, marks=pytest.mark.long),
        ("copies.py", 2, WHOLE),
        ("flat_shards.py --layers", 2, WHOLE),
        ("flat_shards.py --original", 3, WHOLE),
        pytest.param("flat_shards.py", 3, WHOLE, marks=pytest.mark.long),
        pytest.param("flat_shards.py --layers --original", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("tensor_parallel.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("tensor_parallel.py", 3, OWN, marks=pytest.mark.long),
        pytest.param("tensor_parallel.py", 4, OWN, marks=pytest.mark.long),
        pytest.param("two_dimensions.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("two_dimensions.py", 3, WHOLE, marks=pytest.mark.long),
        pytest.param("two_dimensions.py", 4, WHOLE, marks=pytest.mark.long),  # see below
        pytest.param("two_dimensions.py --same-rows", 4, WHOLE, marks=pytest.mark.long),
        pytest.param("attention.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("attention.py --context", 2, OWN, marks=pytest.mark.long),
        pytest.param("pipeline.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("pipeline.py --schedule 1f1b", 3, OWN, marks=pytest.mark.long),
        pytest.param("pipeline.py --traced --layers 4", 2, OWN, marks=pytest.mark.long),
        pytest.param("pipeline.py --clip", 2, OWN, marks=pytest.mark.long),
        pytest.param("pipeline.py --schedule 1f1b", 4, OWN, marks=pytest.mark.long),
        ("renumbered_stages.py --tied", 2, OWN),
        pytest.param("renumbered_stages.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("renumbered_stages.py --sharded", 4, WHOLE, marks=pytest.mark.long),
        ("gpt_train.py", 2, TURNS),
        pytest.param("gpt_train.py --compiled=", 3, TURNS, marks=pytest.mark.long),
        pytest.param("gpt_train.py --batch_size=2", 4, TURNS, marks=pytest.mark.long),
        pytest.param("accumulate.py", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("accumulate.py --sharded", 3, WHOLE, marks=pytest.mark.long),
        ("accumulate.py --batch-norm", 3, PART),
        pytest.param("accumulate.py --batch-norm --unsent", 3, PART, marks=pytest.mark.long),
        ("accumulate.py --batch-norm --sync", 3, WHOLE),
        pytest.param("kept_state.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("main_grad.py", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("accumulate.py --accumulate 3", 4, WHOLE, marks=pytest.mark.long),
        ("loops.py counts", 3, WHOLE),
        pytest.param("loops.py counts --tensor", 3, WHOLE, marks=pytest.mark.long),
        pytest.param("loops.py penalty", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("loops.py two", 2, WHOLE, marks=pytest.mark.long),
        ("loops.py closure", 2, WHOLE),
        pytest.param("loops.py inside", 2, WHOLE, marks=pytest.mark.long),
        ("loops.py bf16", 3, WHOLE),
        ("loops.py again", 2, WHOLE),
        ("loops.py join", 2, WHOLE),
        pytest.param("loops.py resume", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("loops.py counts --norm all", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("loops.py again --reentrant", 2, WHOLE, marks=pytest.mark.long),
        pytest.param("megatron_style.py", 2, OWN, marks=pytest.mark.long),
        pytest.param("megatron_style.py", 3, OWN, marks=pytest.mark.long),
        pytest.param("megatron_style.py", 4, OWN, marks=pytest.mark.long),
    ],
)
def test_right(command: str, ranks: int, way: str) -> None:
    report = verified(command, ranks, reference="parts" if way == PART else "whole")
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    names = {check.name: check.count for check in report.checks}
    assert names.get("gradients", names.get(LATE, 0)) > 0, told(report)
    assert names["parameters after steps"] > 0, told(report)
    assert any(way in note for note in report.notes), told(report)
    assert not any("register_hook" in note or "nobody waits" in note for note in report.notes), told(report)


def test_a_call_that_nobody_waits_for_is_told() -> None:
    report = verified("by_hand.py --broken wait", 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert any(note.startswith("nobody waits for all_reduce at by_hand.py:") for note in report.notes), told(report)


def test_a_mean_over_data_parts_is_not_the_script_on_whole_batches() -> None:
    report = verified("accumulate.py --batch-norm", 3)
    assert report.verdict is Verdict.INCONCLUSIVE
    (finding,) = report.findings
    assert finding.code == "not_compared" and "with the mean over the data parts" in finding.message
    assert "--reference parts" in str(finding.help)


@pytest.mark.long
def test_a_sum_over_data_parts_is_not_the_script_on_whole_batches() -> None:
    """Losses are divided by the labels of all ranks, behind a batch norm of the rank's own rows."""
    report = verified("loops.py counts --tensor --norm own", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (finding,) = report.findings
    assert finding.code == "not_compared" and "with the sum over the data parts" in finding.message, told(report)
    assert "unequal counts" not in str(finding.cause)
    assert "--reference parts" not in str(finding.help)  # which says that a mean is meant
    meant = verified("loops.py counts --tensor --norm own", 2, reference="parts")
    assert meant.verdict is Verdict.INCONCLUSIVE, told(meant)


@pytest.mark.long
def test_a_mean_of_means_behind_a_norm_of_all_rows_is_left_open() -> None:
    report = verified("loops.py counts --tensor --norm all --broken own", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert all("rows of all ranks are coupled" in str(finding.cause) for finding in report.findings), told(report)


@pytest.mark.long
def test_gradients_of_micro_batches_that_are_added_up_are_told() -> None:
    report = verified("pipeline.py --layers 4 --added", 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert any("(`scale_grads=False`), on one rank too" in note for note in report.notes), told(report)


@pytest.mark.long
def test_a_sum_that_is_averaged_is_named() -> None:
    """Clipped gradients are the same: their norm alone shows that a loss over more rows is a larger one."""
    report = verified("fsdp_transformer.py", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "it is 1/2 of that, as where a loss is a sum over rows" in str(report.findings[0].cause), told(report)


def test_data_parts_are_those_of_the_mesh() -> None:
    report = verified("two_dimensions.py", 4)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert any(WHOLE in note for note in report.notes), told(report)
    assert "data parts, by what the ranks took in: 0 1; 2 3 (ranks)" in report.notes
    assert "process groups: [0, 1], [0, 2], [1, 3], [2, 3]" in report.notes, told(report)


@pytest.mark.long
def test_equal_rows_that_a_script_draws_are_told_in_a_note() -> None:
    report = verified("two_dimensions.py --same-rows", 4)
    assert any("take in the same data, and do the work of one" in note for note in report.notes), told(report)
    assert any(note.startswith("with other data on every rank") for note in report.notes), told(report)


def test_what_was_done_for_the_script_is_told() -> None:
    notes = verified("gpt_train.py", 2).notes
    assert "the script asserts that there is a GPU: it was told that there is one" in notes
    assert "the script asks for nccl: gloo took its place" in notes
    assert any(note.startswith("every data part counts as many labels") for note in notes)
    assert "torch.compile was left out: the eager program was run" in notes
    notes = verified("sampler.py --batch-size 5", 3).notes
    assert "the script asks for cuda devices: they were the CPU" in notes
    assert "on one rank, the optimizer's lr is another number: it was that of the ranks" in notes


def test_its_own_dtype_where_float64_does_not_run(tmp_path: Path) -> None:
    script = tmp_path / "single.py"
    script.write_text(SINGLE)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.TESTED_CALIBRATED, told(report)
    assert report.environment["dtype"] == "float32"
    assert any(note.startswith("the script does not run in float64") for note in report.notes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "verdict"),
    [
        ("", Verdict.TESTED_CALIBRATED),
        ("whole", Verdict.REFUTED),
        ("loss", Verdict.TESTED_CALIBRATED),
        ("loss summed", Verdict.REFUTED),
    ],
)
def test_rounding_of_mixed_precision_is_no_difference(tmp_path: Path, broken: str, verdict: Verdict) -> None:
    """A cast to bfloat16 rounds otherwise in a batch of other rows; clipping hands the norm's rounding on. A loss
    in bfloat16 is rounded itself, which all runs with other rounding may do alike."""
    script = tmp_path / "mixed.py"
    script.write_text(MIXED)
    report = verify_script([str(script), *broken.split()], ranks=2)
    assert report.verdict is verdict, told(report)


@pytest.mark.long
def test_rounding_that_cannot_be_measured_refutes_nothing(tmp_path: Path) -> None:
    kept = ["kept = model.module[0].weight.detach().clone()", "for _ in range(4):", "    with torch.autocast('cpu'):"]
    kept += ["        model(torch.ones(2, 8))", "    assert _ or torch.equal(kept, model.module[0].weight)"]
    script = tmp_path / "kept.py"
    script.write_text(
        SINGLE.replace("for _ in range(4):", "\n".join(kept)).replace(
            "cross_entropy(model(x)", "cross_entropy(torch.autocast('cpu')(model)(x)"
        )
    )
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "no run with other rounding ended well: AssertionError" in str(report.findings[0].cause), told(report)


MIXED = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 40))
assert all(p.dtype == torch.float32 for p in model.parameters())
if "whole" not in sys.argv:
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    if "summed" in sys.argv:
        model.set_gradient_divide_factor(1.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
for _ in range(3):
    made = model(torch.randint(0, 40, (8, 12)))
    loss = ((made if "loss" in sys.argv else made.float()) ** 2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_hooks_on_gradients_are_told(tmp_path: Path) -> None:
    script = tmp_path / "clamped.py"
    hooks = "for p in model.parameters():\n    p.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))\n"
    script.write_text(
        SINGLE.replace("    assert x.dtype", "    # assert x.dtype").replace("optimizer =", hooks + "optimizer =")
    )
    report = verify_script([str(script)], ranks=2)
    (note,) = (note for note in report.notes if "register_hook" in note)
    assert note.startswith(
        "hooks of the script (`register_hook`) see the gradients of 0.weight, 0.bias, 2.weight and 1 more"
    )


SINGLE = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    x, y = torch.randn(6, 8), torch.randint(0, 3, (6,))
    assert x.dtype == torch.float32
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_ranks_of_accelerate_are_those_of_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "accelerated.py"
    script.write_text(ACCELERATED)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert "data parts, by what the ranks took in: 0; 1 (ranks)" in report.notes


def test_ddp_in_the_place_of_fsdp_decides_nothing(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "plugin.py"
    plugin = "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), "
    script.write_text(
        ACCELERATED.replace("Accelerator(", f"Accelerator({plugin}").replace(
            "import A", "import FullyShardedDataParallelPlugin, A"
        )
    )
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "the script asks accelerate for FSDP, and on a CPU accelerate takes DDP" in report.findings[0].message


def test_a_script_that_starts_its_ranks_decides_nothing(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "the script starts ranks by torch.multiprocessing" in report.findings[0].message


SPAWNS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, world):
    os.environ["MASTER_PORT"] = "29533"
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,))), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), data)
for x, y in data:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_two_models_and_two_optimizers(tmp_path: Path) -> None:
    script = tmp_path / "adversarial.py"
    script.write_text(TWO_MODELS)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert next(check for check in report.checks if check.name == "gradients").count == 2 * 4 * 6  # ranks, steps, names


TWO_MODELS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
made, judge = DDP(nn.Linear(3, 4)), DDP(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
first = ZeroRedundancyOptimizer(made.parameters(), torch.optim.Adam, lr=1e-3)
second = torch.optim.Adam(judge.parameters(), 1e-3)
loss_fn = nn.BCEWithLogitsLoss()
torch.manual_seed(10 + dist.get_rank())
for _ in range(5):
    real, noise = torch.randn(6, 4), torch.randn(6, 3)
    fake = made(noise)
    second.zero_grad()
    (loss_fn(judge(real), torch.ones(6, 1)) + loss_fn(judge(fake.detach()), torch.zeros(6, 1))).backward()
    second.step()
    first.zero_grad()
    loss_fn(judge(fake), torch.ones(6, 1)).backward()
    first.step()
"""

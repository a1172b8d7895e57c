"""Random numbers by the wrong policy: what replicas share and shards do not, each in a program that is right without.

None of these is wrong in its distribution, so that no training curve shows it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import verify
from tests.broken.planting import Edit, Original, compile_original, plant
from tests.sampling import every

WIDTH, HIDDEN, ROWS, TOKENS, HEADS = 12, 20, 16, 6, 2


class Dropping(nn.Module):
    """Dropout of shards (between two linear layers, in attention) and of copies (of their sum), and other draws."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.25).transpose(1, 2).flatten(2)
        hidden = F.dropout(F.gelu(self.up(x)), 0.3)
        x = x + F.dropout(self.down(hidden), 0.2)
        x = x + 0.1 * torch.randn_like(x)
        return F.cross_entropy(self.head(x).mean(1), labels)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return Dropping()


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """dp=2, tp=2, two micro-batches; all four draws are compared."""
    folder = tmp_path_factory.mktemp("dropping")
    return compile_original(folder, dropping, rows(), 4, "dp=2,tp=2", micro_batches=2)


def text_of(original: Original) -> str:
    return (original.folder / "role_0.py").read_text(encoding="utf-8")


def draw(text: str, name: str) -> str:
    """The call of ops that draws as `name`."""
    found = re.search(rf"ops\.\w+\(.*'{name}'.*\)(?=  #)", text)
    assert found, name
    return found[0]


def refuted(original: Original, folder: Path, edit: Edit) -> verify.Report:
    report = original.verify(original.broken(folder, [edit]), depth="quick")
    assert report.exit_code == 1, report.to_json()
    return report


def test_the_program_draws_what_the_model_draws(original: Original) -> None:
    report = original.verify(original.folder, depth="quick")
    assert report.exit_code == 0, report.to_json()
    assert any("the same random numbers" in note and "4 random operations" in note for note in report.notes)


@pytest.mark.parametrize("axis", every(2, ["dp", "micro", "tp"]))
def test_one_mask_for_all_shards_of_an_axis(original: Original, tmp_path: Path, axis: str) -> None:
    """The first shard's mask everywhere: the state is taken away, and the dim is as small as the shard."""
    call = draw(text_of(original), "dropout")
    states = re.search(r"\{.*\}", call)
    shape = re.search(r"\((\d+), (\d+), (\d+)\)\)$", call)
    assert states is not None and shape is not None
    entry = re.search(rf'"{axis}": Sharded\((\d)[^)]*\)(, )?', states[0])
    assert entry is not None, f"dropout of the hidden layer is not sharded over {axis}"
    sizes = [int(size) for size in shape.groups()]
    sizes[int(entry[1])] //= 2
    kept = states[0].replace(entry[0], "").replace(", outer=2", "").replace(", }", "}")
    wrong = call.replace(states[0], kept).replace(shape[0], f"({', '.join(map(str, sizes))}))")
    refuted(original, tmp_path, Edit(call, wrong))


def test_another_mask_on_each_copy(original: Original, tmp_path: Path) -> None:
    """tp holds copies of the attention weights: their masks have to be the same."""
    name = "scaled_dot_product_attention_dropout"
    call = draw(text_of(original), name)
    assert '"tp"' not in call
    refuted(original, tmp_path, Edit(call, call.replace(f"'{name}'", f"f'{name} {{self.tp.index}}'")))


@pytest.mark.parametrize("other", every(2, ["dropout", "scaled_dot_product_attention_dropout"]))
def test_the_numbers_of_another_operation(original: Original, tmp_path: Path, other: str) -> None:
    call = draw(text_of(original), "dropout_1")
    refuted(original, tmp_path, Edit(call, call.replace("'dropout_1'", f"'{other}'")))


def test_numbers_that_do_not_change_from_step_to_step(original: Original, tmp_path: Path) -> None:
    """The first step is right. The draw is told a stage whose step never advances."""
    call = draw(text_of(original), "dropout_1")
    stuck = "__import__('types').SimpleNamespace(context=type(self.context)(self.context.seed, True, 0), "
    stuck += "sizes=self.sizes, coordinates=self.coordinates, device=self.device)"
    wrong = call.replace(", self, ", f", {stuck}, ")
    report = refuted(original, tmp_path, Edit(call, wrong))
    wrong_losses = [f.counter_example["step"] for f in report.findings if f.code == "loss_differs"]
    assert wrong_losses == ["1"], report.to_json()


@pytest.mark.parametrize(("old", "new"), every(2, [("0.2, self", "0.25, self"), ("0.2, self", "0.0, self")]))
def test_another_probability(original: Original, tmp_path: Path, old: str, new: str) -> None:
    call = draw(text_of(original), "dropout_1")
    refuted(original, tmp_path, Edit(call, call.replace(old, new)))


def test_dropout_that_is_not_scaled(original: Original, tmp_path: Path) -> None:
    call = draw(text_of(original), "dropout_1")
    refuted(original, tmp_path, Edit(call, f"({call} * 0.8)"))


def test_noise_of_the_wrong_place(original: Original, tmp_path: Path) -> None:
    """randn_like: the first half for the first rank, where every other quarter is its own."""
    (call,) = re.findall(r"ops\.random_normal\(.*\)(?=  #)", text_of(original))
    assert '"tp": Sharded(2, outer=2)' in call
    refuted(original, tmp_path, Edit(call, call.replace(", outer=2", "")))


class Wavering(nn.Module):
    """Two draws of one line and size, of which the loss needs one: which one cannot be known."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        drawn = [F.dropout(self.proj(x), 0.5) for _ in range(3)]
        return drawn[0].square().mean() + drawn[2].mean()


def test_draws_that_do_not_match_are_never_a_pass() -> None:
    report = verify.verify_plan(Wavering(), {"x": torch.randn(8, 6)}, ranks=2, plan="dp=2")
    assert report.exit_code == 3, report.to_json()
    (finding,) = report.findings
    assert finding.code == "random_numbers_unmatched"
    others = [check for check in report.checks if check.name != "random numbers"]
    assert len(others) > 4 and all(check.verdict.passes for check in others)


def test_an_edit_is_planted(original: Original, tmp_path: Path) -> None:
    """The tool itself: a text that is not there is an error."""
    program = original.broken(tmp_path, [])
    with pytest.raises(AssertionError):
        plant(program / "role_0.py", Edit("no such text", "x"))

"""Reading a generated program back: assignments, what they read, and the model's lines."""

from __future__ import annotations

from pathlib import Path

from verify.programs.source_map import assignments_of, describe_line

TEXT = '''
class Stage2(Stage):
    """layers.0"""

    index = 2
    ranks = (0, 1)

    def prepare(self, labels):
        count = ops.ce_count(labels, -1)
        return {"count": count}

    def forward(self, x, count):
        # model.py:31 (layers.0.up)  y = self.up(x)
        up = aten.linear(x, self.up_weight)
        with torch.no_grad():
            largest, _ = ops.ce_max(up)

        def recompute_0(up):
            gelu = aten.gelu(up)
            return gelu,

        (gelu,) = recompute(recompute_0, up)
        return {"y": gelu}
'''


def test_assignments(tmp_path: Path) -> None:
    file = tmp_path / "role_0.py"
    file.write_text(TEXT)
    found = assignments_of(str(file))
    assert [(a.names, a.phase) for a in found if a.is_arguments] == [
        (("labels",), "prepare"),
        (("x", "count"), "forward"),
    ]
    found = tuple(a for a in found if not a.is_arguments)
    assert [(a.stage, a.phase, a.names) for a in found] == [
        (2, "prepare", ("count",)),
        (2, "forward", ("up",)),
        (2, "forward", ("largest", "_")),
        (2, "forward", ("gelu",)),
        (2, "forward", ("gelu",)),
    ]
    up = found[1]
    assert {"x", "up_weight"} <= set(up.reads)
    assert up.model == ("model.py", 31, "y = self.up(x)")
    assert found[0].model is None


def test_a_line_is_described(tmp_path: Path) -> None:
    file = tmp_path / "role_0.py"
    file.write_text(TEXT)
    number = TEXT.splitlines().index("        up = aten.linear(x, self.up_weight)") + 1
    line = describe_line(str(file), number)
    assert line is not None and line.names == ("up",)
    assert describe_line(str(tmp_path / "none.py"), 1) is None


def test_text_that_is_no_python(tmp_path: Path) -> None:
    file = tmp_path / "role_0.py"
    file.write_text("class (:\n")
    assert assignments_of(str(file)) == ()

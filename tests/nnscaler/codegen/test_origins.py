"""The names of the user's files in rank programs."""

from __future__ import annotations

from nnscaler.codegen.python_text_of_calls import operator_files, written_origins


def test_programs_name_files_without_their_folder() -> None:
    origins = {"gelu": ("a/ops.py", "gelu"), "moe": ("pkg.moe", "moe")}
    assert written_origins(origins) == {"gelu": ("ops.py", "gelu"), "moe": ("pkg.moe", "moe")}
    assert operator_files(origins) == {"ops.py": "a/ops.py"}


def test_two_files_of_one_name_are_not_taken_for_each_other() -> None:
    origins = {"gelu": ("a/ops.py", "act"), "silu": ("b/ops.py", "act")}
    assert written_origins(origins) == origins
    assert operator_files(origins) == {"a/ops.py": "a/ops.py", "b/ops.py": "b/ops.py"}

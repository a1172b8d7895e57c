"""One class name has one meaning, and docstrings say what a thing is or does."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.architecture.conftest import statements

SAME_CLASS_NAMES = 3  # that stand in three or more files
QUESTIONS = 45

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_a_class_name_has_one_meaning(product: dict[str, ast.Module]) -> None:
    """Counted without the underscore of private classes, which nobody hears."""
    places: dict[str, set[str]] = defaultdict(set)
    for path, tree in product.items():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(path)
    shared = {name: sorted(found) for name, found in places.items() if len(found) >= 3}
    assert len(shared) <= SAME_CLASS_NAMES, f"class names in three or more files: {shared}"


def test_docstrings_do_not_begin_with_a_question(product: dict[str, ast.Module]) -> None:
    questions = []
    for path, tree in product.items():
        for node in (tree, *statements(tree)):
            if isinstance(node, Documented):
                first = (ast.get_docstring(node) or "").split(maxsplit=1)[:1]
                if first and first[0].rstrip(",;:") in ("What", "Whether"):
                    questions.append(f"{path}:{getattr(node, 'lineno', 1)}")
    assert len(questions) <= QUESTIONS, f"{len(questions)} docstrings begin with What or Whether:\n" + "\n".join(
        questions
    )

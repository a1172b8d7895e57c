"""Files, functions, calls and folders of a size that a reader can hold at once; a short file is an idea of its own."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.architecture.conftest import statements

FILE_LINES = 400
FUNCTION_LINES = 60
SHORT_LINES, SHORT_FILES = 60, 40
FOLDER_FILES = 18  # without `__init__`
PARAMETERS = 7  # without `self` and `cls`
MORE_PARAMETERS = {  # function -> why it has more
    "nnscaler/compile.py parallelize": "a front door: options by keyword",
    "verify/programs/verify_plan.py verify_plan": "a front door: options by keyword",
    "nnscaler/runtime/ops/index.py embedding_bag": "written in programs, which keep their text",
    "nnscaler/runtime/ops/ring_attention.py ring_attention": "the same",
    "nnscaler/runtime/ops/convolve_and_pool_output_rows.py conv_window": "the same",
    "nnscaler/runtime/ops/convolve_and_pool_output_rows.py conv_transpose_window": "the same",
}
TEXT = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".cfg", ".json"}


def test_no_file_is_longer_than_the_limit(files: list[Path], repository: Path) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files if path.suffix in TEXT}
    long = {str(path.relative_to(repository)): n for path, n in lengths.items() if n > FILE_LINES}
    assert not long, f"longer than {FILE_LINES} lines: {long}"


def test_no_function_is_longer_than_the_limit(trees: dict[str, ast.Module]) -> None:
    long: list[str] = []
    for path, tree in trees.items():
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not long, f"functions longer than {FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_calls_are_short(product: dict[str, ast.Module]) -> None:
    long = []
    for path, tree in product.items():
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(argument.arg not in ("self", "cls") for argument in arguments) > PARAMETERS:
                    long.append(f"{path} {node.name}")
    assert sorted(long) == sorted(MORE_PARAMETERS), f"functions of more than {PARAMETERS} parameters"


def test_short_files_are_few(product: dict[str, ast.Module], repository: Path) -> None:
    """A few lines that one other file reads belong into that file."""
    modules = [path for path in product if not path.endswith("__init__.py")]
    lengths = {path: len((repository / path).read_text(encoding="utf-8").splitlines()) for path in modules}
    short = [path for path, length in lengths.items() if length <= SHORT_LINES]
    assert len(short) <= SHORT_FILES, f"{len(short)} files of {SHORT_LINES} lines or fewer:\n" + "\n".join(short)


def test_folders_are_not_flat(product: dict[str, ast.Module]) -> None:
    counts = Counter(str(Path(path).parent) for path in product if not path.endswith("__init__.py"))
    flat = {folder: count for folder, count in counts.items() if count > FOLDER_FILES}
    assert not flat, f"folders of more than {FOLDER_FILES} modules: {flat}"

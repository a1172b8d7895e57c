"""What a process that trains holds of memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.training.programs_by_batch_size import valueless

ROWS, CLASSES = 10_240, 1_024  # 40 MiB: the system gives each such tensor memory of its own, and has it back at once
RESET = Path("/proc/self/clear_refs")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.words(x), labels)


class Hooked(nn.Linear):
    """Adds a hook to the module around it when a copy of it is made, as another thread may."""

    around: nn.Module | None = None

    def __new__(cls, *_: object) -> Hooked:
        if cls.around is not None:
            cls.around.register_forward_pre_hook(lambda *_: None)
        return super().__new__(cls)


def head(rows: int) -> tuple[nnscaler.Program, dict[str, Tensor]]:
    batch = {"x": torch.randn(rows, 4), "labels": torch.randint(CLASSES, (rows,))}
    return nnscaler.parallelize(Head(), batch, ranks=1, plan="dp=1"), batch


def test_a_model_is_copied_while_hooks_are_added_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Head(), {"x": torch.randn(4, 4), "labels": torch.randint(CLASSES, (4,))}
    model.register_forward_pre_hook(inner := Hooked(4, 4))  # so that it is copied while the hooks are looked at
    model.register_forward_pre_hook(lambda *_: None)
    program = nnscaler.parallelize(Head(), batch, ranks=1, plan="dp=1")
    assert program.origin is not None
    monkeypatch.setattr(Hooked, "around", model)
    valueless(replace(program, origin=replace(program.origin, module=model)))
    assert len(model._forward_pre_hooks) == 3 and inner in model._forward_pre_hooks.values()


@pytest.mark.long
@pytest.mark.skipif(not RESET.exists(), reason="the system does not tell a process's peak of memory since a moment")
def test_two_tensors_of_the_size_of_the_logits_are_the_most() -> None:
    program, batch = head(ROWS)
    engine = nnscaler.start(program)
    engine.step(batch)
    RESET.write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    engine.step(batch)
    assert 1.9 < (resident("VmHWM") - before) / (4 * ROWS * CLASSES) < 2.3


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has nothing to give back")
def test_what_was_freed_before_training_is_the_systems_again() -> None:
    program, _ = head(4)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    size, count = 2**15, 4096  # 128 MiB, in pieces that are no memory of their own
    pieces = [libc.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[:-1]:  # below the last one: the library keeps all of it
        libc.free(piece)
    before = resident("VmRSS")
    nnscaler.start(program)
    assert before - resident("VmRSS") > size * count / 2
    libc.free(pieces[-1])


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

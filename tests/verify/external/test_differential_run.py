"""What torch says while ranks run does not reach the console; what it says at other times does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.verify.external import programs
from verify.external.differential_run import ExternalSettings
from verify.external.verify import verify_program
from verify.results.verdict import Verdict

FAKE = logging.getLogger("torch._subclasses.fake_tensor")  # it logs what operators refuse, and raises it


class Heard(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    FAKE.addHandler(handler)
    yield handler
    FAKE.removeHandler(handler)


def test_what_torch_logs_of_fake_tensors_is_kept_from_the_console(heard: Heard) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        FAKE.error("on ranks" if dist.is_initialized() else "in the plain model")
        return model(*batch)  # type: ignore[no-any-return]

    program = replace(programs.program(programs.tensor_parallel, tp=2), step=step)
    assert verify_program(program, ExternalSettings(steps=1, isolate=False)).verdict is Verdict.TESTED_EXACT
    assert set(heard.texts) == {"in the plain model"}
    FAKE.error("later")
    assert heard.texts[-1] == "later"

"""Programs to break, each compiled and verified once."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import nnscaler
from nnscaler.transform.plan import Plan, ReplicateStep, SplitStep
from tests.broken import models
from tests.broken.planting import Original, compile_original


@pytest.fixture(autouse=True)
def kept_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A refuted program is kept in the temporary folder, for its user to read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def _models_are_traced_once(traced_once: None) -> None:
    """The bugs are in programs."""


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The transformer, dp=2 and tp=2: one role."""
    return compile_original(tmp_path_factory.mktemp("sharded"), models.transformer, models.text(), 4, "dp=2,tp=2")


@pytest.fixture(scope="session")
def one_block(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The transformer with a single block, dp=2 and tp=2."""
    return compile_original(tmp_path_factory.mktemp("one_block"), models.one_block, models.text(), 4, "dp=2,tp=2")


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The transformer, dp=2 and pp=2 with 4 micro-batches: role 0 is stage 0 on ranks 0 and 1."""
    folder = tmp_path_factory.mktemp("staged")
    return compile_original(folder, models.transformer, models.text(), 4, "dp=2,pp=2", micro_batches=4)


@pytest.fixture(scope="session")
def resting(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The perceptron, dp=3 with parameters in shards, which are of unequal sizes."""
    folder = tmp_path_factory.mktemp("resting")
    return compile_original(folder, models.perceptron, models.points(), 3, "dp=3,zero=3")


@pytest.fixture(scope="session")
def looked_up(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The transformer, tp=2, with the vocabulary of its embedding split."""
    plan = nnscaler.parallelize(models.transformer(), models.text(), ranks=2, plan="tp=2").plan
    split = replace(plan, steps=(*plan.steps, SplitStep(("embedding",), "tp", "v")))
    return compile_original(tmp_path_factory.mktemp("looked_up"), models.transformer, models.text(), 2, split)


@pytest.fixture(scope="session")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The model whose rows become a factor, whole on each of two ranks."""
    plan = Plan((("tp", 2),), (ReplicateStep(("mul", "pixel_shuffle", "sum_1"), "tp"),))
    return compile_original(tmp_path_factory.mktemp("shuffled"), models.shuffled, models.maps(), 2, plan)


@pytest.fixture(scope="session")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The model with batch norm, dp=2: the batch is split, and its statistics are sums over dp."""
    return compile_original(tmp_path_factory.mktemp("normed"), models.normed, models.images(), 2, "dp=2")


@pytest.fixture(scope="session")
def small_sharded(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The perceptron, tp=2: one all_reduce."""
    return compile_original(tmp_path_factory.mktemp("small_sharded"), models.perceptron, models.points(), 2, "tp=2")


@pytest.fixture(scope="session")
def small_staged(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The perceptron, pp=2 with 2 micro-batches: one message each way."""
    folder = tmp_path_factory.mktemp("small_staged")
    return compile_original(folder, models.perceptron, models.points(), 2, "pp=2", micro_batches=2)

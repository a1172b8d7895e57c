"""Configurations of transformers: found, changed, and refused with a way out."""

from __future__ import annotations

import builtins
import importlib
from pathlib import Path
from typing import Any

import pytest

from nnscaler.errors import NnscalerError
from verify.external.transformers.find_and_change_config import (
    configuration,
    fields_of,
    library,
    targets,
    with_settings,
)


def test_targets_declare_a_plan_and_can_be_made() -> None:
    kinds = targets()
    assert len(kinds) > 100
    assert {"llama", "qwen3_moe", "qwen2_5_vl_text", "zaya"} <= set(kinds)  # zaya: an expert plan alone
    assert "bert" not in kinds
    assert kinds == sorted(set(kinds))


def test_an_unknown_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(NnscalerError, match="has no model type 'lama'") as caught:
        configuration("lama")
    assert "hf:llama" in str(caught.value.help)


def test_a_local_folder_is_read(tmp_path: Path) -> None:
    made = with_settings(configuration("qwen3"), {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    made.save_pretrained(tmp_path)
    read = configuration(str(tmp_path))
    assert type(read) is type(made)
    assert read.num_hidden_layers == 3


def test_a_folder_without_a_known_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NnscalerError, match="cannot be read"):
        configuration(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(NnscalerError, match="model_type 'nothing'"):
        configuration(str(tmp_path))


def test_settings_change_fields_and_those_of_parts() -> None:
    assert with_settings(configuration("llama"), {"attention_bias": True}).attention_bias is True
    whole = with_settings(configuration("muse_glimmer"), {"text_config.num_attention_heads": 8})
    assert whole.text_config.num_attention_heads == 8


def test_a_wrong_key_is_refused_with_suggestions() -> None:
    with pytest.raises(NnscalerError, match="LlamaConfig has no field 'atention_bias'") as caught:
        with_settings(configuration("llama"), {"atention_bias": True})
    assert "attention_bias" in str(caught.value.help)


def test_a_wrong_value_is_refused_with_the_librarys_words() -> None:
    with pytest.raises(NnscalerError, match="LlamaConfig refuses num_attention_heads=7"):
        with_settings(configuration("llama"), {"num_attention_heads": 7})


def test_fields_under_another_name_are_found() -> None:
    assert fields_of(configuration("qwen3_moe"))["num_experts"] == 128  # stored as num_local_experts


def test_transformers_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: Any) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert builtins.__import__ is not None
    with pytest.raises(NnscalerError, match="need transformers, which cannot be imported") as caught:
        library()
    assert "pip install" in str(caught.value.help)

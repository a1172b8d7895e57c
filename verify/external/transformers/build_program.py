"""Turn `hf:TYPE` into a program that can be verified: a small model of the installed transformers with random weights,
parallelised by the library's own plan, through the library's own code."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nnscaler.errors import NnscalerError
from verify.external.program import Batch, ExternalProgram, PretrainedFunctions, Step, default_step
from verify.external.request import LIBRARY
from verify.external.transformers.check_parallel_degrees import (
    PlanChanges,
    PlanSizes,
    check_plans,
    check_sizes,
    other_sizes,
)
from verify.external.transformers.find_and_change_config import configuration, library, with_settings
from verify.external.transformers.shrink_config import Sizes, shrink

ROWS, LENGTH = 4, 16  # of a batch: sequences, and tokens of each
NOISE = 0.05  # standard deviation of what is added to every parameter: no unit norms, no zero biases
_SEED = 0


@dataclass(frozen=True)
class BuiltModel:
    """A small plain model.

    config     that it was made of
    model      on the CPU, in float32, with every parameter disturbed
    batch      keyword arguments of its forward
    is_scored  its forward returns a loss
    """

    config: Any
    model: nn.Module
    batch: Mapping[str, Tensor]
    is_scored: bool

    @property
    def step(self) -> Step:
        """Make a loss of the model and a batch: its own, or a fixed linear function of what it returns."""
        return default_step if self.is_scored else linear_loss


def transformers_program(
    target: str,
    sizes: PlanSizes | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    exact: bool = True,
    changes: PlanChanges | None = None,
) -> ExternalProgram:
    """Make the program of `hf:TYPE` (a model type, or a local folder with a configuration).

    settings  fields of the configuration that are changed, after it was shrunk
    exact     it will run in float64, which the grouped kernel of experts does not know: experts run one by one
    changes   rules that are added to the plans

    Raises NnscalerError: `usage`, `no_plan` where the model has no such plan, `not_built` where no small model of that
    type can be made and run.
    """
    sizes = sizes or PlanSizes(tp=2)
    check_sizes(sizes)
    _check_library()
    name = target.removeprefix(LIBRARY)
    built = build(name, sizes, settings or {}, exact=exact)
    check_plans(built.model, sizes)
    return _program(name, built, sizes, changes or PlanChanges())


def _program(name: str, built: BuiltModel, sizes: PlanSizes, changes: PlanChanges) -> ExternalProgram:
    options = distributed_options(sizes, changes, built.model)

    kind: Any = type(built.model)

    def elsewhere() -> ExternalProgram | None:
        other = other_sizes(built.model, sizes)
        return None if other is None else _program(name, built, other, changes)

    return ExternalProgram(
        name=f"{LIBRARY}{name} {sizes}".strip(),
        model=lambda: copy.deepcopy(built.model),
        batch=lambda: dict(built.batch),
        parallelize=lambda model, mesh: parallelize(model, options),
        mesh=sizes.mesh(),
        data_axes=("fsdp",) if sizes.fsdp > 1 else (),
        step=built.step,
        pretrained=PretrainedFunctions(
            lambda model, folder: model.save_pretrained(str(folder)),
            lambda folder: kind.from_pretrained(str(folder), distributed_config=copy.deepcopy(options)),
            # the library's loader leaves shards of tied weights in the memory of the whole, from where its writer
            # copies them one by one; those made here have memory of their own, which safetensors does not write twice
            None if built.model.all_tied_weights_keys else _save_shards,
        ),
        elsewhere=elsewhere,
    )


def _save_shards(model: Any, folder: Path) -> None:
    model.save_pretrained(str(folder), distributed_checkpoint=True)


def parallelize(model: Any, options: Mapping[str, Any]) -> Any:
    """Apply the library's own plans to a model, as `from_pretrained(distributed_config=...)` does between making a
    model and reading its weights: tied weights are apart then, and tied afterwards."""
    distributed = importlib.import_module("transformers.distributed")
    utilities = importlib.import_module("transformers.distributed.utils")
    config = distributed.DistributedConfig(**copy.deepcopy(dict(options)))
    _, manager = utilities.initialize_distributed_mesh(config)
    _untie(model)
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    made = type(model).maybe_distribute_model(model, config, manager)
    _lay_out_as_loaded(made, whole)
    made.tie_weights(recompute_mapping=False)
    return made


def _untie(model: Any) -> None:
    """Give each name of a tied weight a parameter of its own."""
    for name, source in model.all_tied_weights_keys.items():
        if model.get_parameter(name) is model.get_parameter(source):
            owner, _, field_name = name.rpartition(".")
            copied = nn.Parameter(model.get_parameter(source).detach().clone())
            setattr(model.get_submodule(owner), field_name, copied)


def _lay_out_as_loaded(model: Any, whole: Mapping[str, Tensor]) -> None:
    """Give shards the order in which they are after loading: files have the rows of some weights interleaved, and the
    loader takes a rank's part of the file before it sorts them."""
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    sorting = [(converter.target_patterns, operation) for converter in mapping for operation in _sorts_rows(converter)]
    for name, parameter in model.named_parameters():
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        for patterns, operation in sorting:
            is_cut = any(isinstance(p, Shard) and p.dim % parameter.ndim == operation.dim for p in placements)
            if is_cut and any(re.search(pattern, name) for pattern in patterns):
                file = _sorted_rows(whole[name], operation.reverse_op)
                part = distribute_tensor(file, parameter.device_mesh, placements, src_data_rank=None)
                with torch.no_grad():
                    parameter.to_local().copy_(_sorted_rows(part.to_local(), operation))


def _sorts_rows(converter: Any) -> list[Any]:
    """Return the operations of a converter that sort interleaved rows."""
    return [operation for operation in getattr(converter, "operations", ()) if type(operation).__name__ == "Interleave"]


def _sorted_rows(value: Tensor, operation: Any) -> Tensor:
    converted: Mapping[str, Tensor] = operation.convert({"": value}, source_patterns=[""], target_patterns=[""])
    return converted[""]


def distributed_options(sizes: PlanSizes, changes: PlanChanges, model: Any) -> dict[str, Any]:
    """Return the arguments of the library's DistributedConfig for a model."""
    options: dict[str, Any] = {"tp_size": sizes.shared, "fsdp_size": sizes.fsdp}
    if sizes.experts_alone:
        # an empty plan is refused, whatever the library's manual says: rules that do nothing stand in its place
        whole = model.tp_plan or [next(name for name, _ in model.named_children())]
        options["tp_plan"] = dict.fromkeys(whole, "replicate")
    elif changes.tp:
        options["tp_plan"] = dict(changes.tp)
    if sizes.ep > 1:
        options["ep_size"] = sizes.ep
        if changes.ep:
            options["ep_plan"] = dict(changes.ep)
    return options


def _check_library() -> None:
    try:
        utilities = importlib.import_module("transformers.distributed.utils")
        base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
        is_known = hasattr(utilities, "initialize_distributed_mesh") and hasattr(base, "maybe_distribute_model")
    except ImportError:
        is_known = False
    if not is_known:
        message = f"transformers {library().__version__} does not apply its plans by DistributedConfig to a made model"
        raise NnscalerError("usage", message, help="pip install 'transformers>=5.24,<6'")


# The plain model.


def build(name: str, sizes: PlanSizes, settings: Mapping[str, Any], *, exact: bool = True) -> BuiltModel:
    """Make a small model of that type, and a batch that it takes. Raises NnscalerError `usage` and `not_built`."""
    small = small_configuration(name, sizes, settings, exact=exact)
    problems: list[str] = []
    for cls in model_classes(small):
        try:
            model = _disturbed(cls, copy.deepcopy(small))
            batch, is_scored = _accepted_batch(model, small, max(ROWS, sizes.fsdp))
            return BuiltModel(small, model, batch, is_scored)
        except NnscalerError as error:
            problems.append(error.message)
        except Exception as error:  # noqa: BLE001 - the library refuses its own configuration
            problems.append(f"{cls.__name__}: {_in_short(error)}")
    message = f"no small model of {name} can be made: {problems[0] if problems else 'the library has no class for it'}"
    raise NnscalerError("not_built", message)


def small_configuration(name: str, sizes: PlanSizes, settings: Mapping[str, Any], *, exact: bool = True) -> Any:
    """Return the shrunk configuration of a model type or folder, with settings applied."""
    heads = max(4, 2 * sizes.shared)
    wanted = Sizes(heads=heads, kv_heads=max(2, sizes.shared), experts=max(4, 2 * sizes.ep))
    try:
        small = shrink(configuration(name), wanted)
    except NnscalerError:
        raise
    except Exception as error:
        raise NnscalerError("not_built", f"the configuration of {name} cannot be shrunk: {_in_short(error)}") from error
    small = with_settings(small, settings) if settings else small
    for part in (small, *(value for value in vars(small).values() if hasattr(value, "model_type"))):
        part.use_cache = False
        if exact and getattr(part, "_experts_implementation", None) is None:
            part._experts_implementation = "eager"
    return small


def model_classes(config: Any) -> list[type]:
    """Return the library's model classes for a configuration, those with a loss over tokens first."""
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    package = type(config).__module__.rpartition(".")[0]
    found: list[type] = []
    for file in sorted(Path(inspect.getfile(type(config))).parent.glob("modeling_*.py")):
        module = importlib.import_module(f"{package}.{file.stem}")
        for value in vars(module).values():
            if not (inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__):
                continue
            configured: Any = value
            if configured.config_class is type(config) and not value.__name__.endswith("PreTrainedModel"):
                found.append(value)
    if not found:  # a model type that runs another one's model
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
        mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING)
        found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    return sorted((cls for cls in found if _preference(cls) < len(_KINDS)), key=_preference)


_KINDS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "Model", "Encoder", "Decoder", "")


def _preference(cls: type) -> int:
    if "For" in cls.__name__ and not cls.__name__.endswith(_KINDS[:3]):
        return len(_KINDS)
    return next(number for number, kind in enumerate(_KINDS) if cls.__name__.endswith(kind))


def _disturbed(cls: type, config: Any) -> Any:
    """Make a model with random weights, and move every parameter and stored buffer by noise; reproducibly."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        model = cls(config)
    model.float()
    generator = torch.Generator().manual_seed(_SEED + 1)
    stored = model.state_dict(keep_vars=True)
    buffers = [tensor for name, tensor in model.named_buffers() if name in stored and tensor.is_floating_point()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator).mul_(NOISE))
    return model


def _accepted_batch(model: Any, config: Any, rows: int) -> tuple[dict[str, Tensor], bool]:
    """Return the first batch that the model takes, and whether it has a loss. Raises the first error of the model."""
    first: Exception | None = None
    for batch in _candidates(config, rows):
        scored = {**batch, "labels": batch["input_ids"]} if _takes_labels(model) and "input_ids" in batch else batch
        for given in (scored, batch) if "labels" in scored else (batch,):
            try:
                with torch.no_grad():
                    output = model(**given)
                if getattr(output, "loss", None) is not None:
                    loss, is_scored = output.loss, True
                else:
                    loss, is_scored = linear_loss(lambda output=output, **_: output, given), False
            except Exception as error:  # noqa: BLE001 - the next candidate may do
                first = first or error
                continue
            if not torch.isfinite(loss):
                raise NnscalerError("not_built", f"{type(model).__name__}: the loss of a small model is not finite")
            return given, is_scored
    assert first is not None, "there is at least one candidate"
    raise first


def _candidates(config: Any, rows: int) -> list[dict[str, Tensor]]:
    text = config.get_text_config()
    generator = torch.Generator().manual_seed(_SEED + 2)
    tokens = torch.randint(3, max(4, getattr(text, "vocab_size", None) or 32), (rows, LENGTH), generator=generator)
    hidden = torch.randn(rows, LENGTH, getattr(text, "hidden_size", None) or 64, generator=generator)
    found: list[dict[str, Tensor]] = [
        {"input_ids": tokens},
        {"inputs_embeds": hidden},
        {"input_ids": tokens, "encoder_hidden_states": hidden.roll(1, 1)},
    ]
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        found.append({"pixel_values": torch.randn(rows, 3, size, size, generator=generator)})
    return found


def _takes_labels(model: Any) -> bool:
    return "labels" in inspect.signature(type(model).forward).parameters


def linear_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Return the mean of the first output, each element times a fixed number that does not depend on its row.

    The mean of the means over equal parts of the batch is the mean over the batch.
    """
    output = model(**batch)
    value = getattr(output, "logits", None)
    value = next(item for item in _items(output) if isinstance(item, Tensor)) if value is None else value
    count = value[0].numel()
    weights = torch.cos(torch.arange(1, count + 1, dtype=torch.float64) * 0.7).to(value.dtype)
    return (value * weights.reshape(value.shape[1:])).mean()


def _items(output: Any) -> list[Any]:
    if isinstance(output, Tensor):
        return [output]
    return list(output.values()) if isinstance(output, Mapping) else list(output)


def _in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:240]

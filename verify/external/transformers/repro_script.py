"""Write what was found as a short script of plain torch and transformers, to be run with a process per rank.

The script makes the plain model, saves it, loads it again with `from_pretrained(distributed_config=...)`, and prints
every gradient that is not the plain model's. It has nothing of ours in it: who reads it needs no other tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verify.external.transformers.build_program import NOISE, BuiltModel
from verify.external.transformers.check_parallel_degrees import PlanSizes
from verify.external.transformers.find_and_change_config import fields_of, library
from verify.external.transformers.shrink_config import lacking

NEEDED = "needs accelerate"
WRONG = 1e-2  # relative error of a gradient in float32 from which the script calls it wrong; rounding gives 1e-6
MOVED = "(held in another order)"  # what it says of a parameter that is not where its layout says


def minimal_script(built: BuiltModel, sizes: PlanSizes, options: Mapping[str, Any]) -> str:
    """Return the script, of at most 20 lines. `options`: of the library's DistributedConfig."""
    config, model = type(built.config), type(built.model)
    ranks, part = sizes.fsdp * sizes.shared, _part(sizes)
    lines = [
        f"import atexit, os, torch, torch.distributed as dist  # torchrun --nproc_per_node {ranks} this.py; {NEEDED}",
        _imports(config, model),
        'dist.init_process_group("gloo"), atexit.register(dist.destroy_process_group), torch.manual_seed(0)',
        f"config = {config.__name__}({_arguments(built.config)})",
        f'plain, folder = {model.__name__}(config).train(), os.environ.get("FOLDER", "small_model")',
        f"with torch.no_grad(): [p.add_({NOISE} * torch.randn_like(p)) for p in plain.parameters()]",
        f"batch = {_batch(built)}; part = {part}" if sizes.fsdp > 1 else f"batch = part = {_batch(built)}",
        *_loss(built),
        "loss(plain, batch).backward()",
        "plain.save_pretrained(folder) if dist.get_rank() == 0 else None; dist.barrier()",
        f"model = {model.__name__}.from_pretrained(folder, distributed_config={dict(options)!r}).train()",
        "(found := loss(model, part)).backward()",
        'print(f"rank {dist.get_rank()}: loss relative error {abs(found / loss(plain, part) - 1):.3g}")',
        'full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t',
        "for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):",
        "    held, grad = full(p.detach()), p.grad if p.grad is None else full(p.grad)",
        f"    if q.grad is not None and (grad is None or (grad - q.grad).norm() > {WRONG} * q.grad.norm()):",
        '        error = float("inf") if grad is None else float((grad - q.grad).norm() / q.grad.norm())',
        '        print(f"rank {dist.get_rank()}: {name} relative error {error:.3g}", MOVED * (not held.allclose(q)))',
    ]
    return "\n".join(lines).replace("MOVED", repr(MOVED)) + "\n"


def _imports(config: type, model: type) -> str:
    if all(hasattr(library(), cls.__name__) for cls in (config, model)):
        return f"from transformers import {config.__name__}, {model.__name__}"
    return "; ".join(f"from {cls.__module__} import {cls.__name__}" for cls in (config, model))


def _arguments(config: Any) -> str:
    """Write the fields of a configuration that are not as by default."""
    default = fields_of(type(config)())
    changed = {name: _plain(value) for name, value in fields_of(config).items() if value != default.get(name)}
    changed |= {name: value for name, value in lacking(config).items() if name not in default}
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())


def _plain(value: Any) -> Any:
    """Return what a literal can say: the changed fields of a part in its place."""
    if hasattr(value, "model_type") and hasattr(value, "to_dict"):
        default = fields_of(type(value)())
        return {name: _plain(item) for name, item in fields_of(value).items() if item != default.get(name)}
    return value


def _batch(built: BuiltModel) -> str:
    """Write a batch like the built model's, with random numbers of the script's own."""
    parts: list[str] = []
    for name, value in built.batch.items():
        shape = ", ".join(str(size) for size in value.shape)
        if name == "labels":
            parts.append('"labels": ids')
        elif value.is_floating_point():
            parts.append(f'"{name}": torch.randn({shape})')
        else:
            parts.append(f'"{name}": (ids := torch.randint(3, {int(value.max()) + 1}, ({shape})))')
    return "{" + ", ".join(parts) + "}"


def _loss(built: BuiltModel) -> list[str]:
    """Write the lines that define `loss`."""
    if built.is_scored:
        return ["loss = lambda model, batch: model(**batch).loss"]
    return [
        "weigh = lambda y: (y * torch.cos(0.7 * torch.arange(1, y[0].numel() + 1)).view(y.shape[1:])).mean()",
        "loss = lambda model, batch: weigh(model(**batch)[0])",
    ]


def _part(sizes: PlanSizes) -> str:
    if sizes.fsdp == 1:
        return "batch"
    return f"{{k: v.chunk({sizes.fsdp})[dist.get_rank() // {sizes.shared}] for k, v in batch.items()}}"

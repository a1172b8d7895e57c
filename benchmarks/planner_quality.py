"""How much faster the planner's plans are than those that people write by hand, by its own cost model.

    python benchmarks/planner_quality.py [--models gpt2 llama t5 swin moe mixtral evoformer] [--devices 8 32 256]
    python benchmarks/planner_quality.py --memory    a limit that no pure plan meets

Models of real sizes are on the meta device; the cluster is `a100x8`, scaled. A hand-written plan splits tp as Megatron
does (`constraints.megatron`), runs all layers again or none, and has the best sizes and micro-batches of its kind: pure
data, tensor and pipeline parallelism with 1F1B, and all their products; its parameters may rest in shards over dp. The
table has seconds of a step relative to the planner's plan, and the certified gap of that.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import planner

CLUSTER = "a100x8"


def _language(config: Any, model: Any, batch: int, tokens: int, **more: Any) -> Any:
    import torch

    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    with torch.device("meta"):
        built = model(config).to(torch.bfloat16)
    return built, {"input_ids": ids, "labels": ids, **more}


def gpt2() -> Any:
    """GPT-2 XL: 48 layers of 1600."""
    import transformers as hf

    config = hf.GPT2Config(n_layer=48, n_embd=1600, n_head=25, use_cache=False)
    return _language(config, hf.GPT2LMHeadModel, 512, 1024)


def llama() -> Any:
    """Llama 3 8B."""
    return planner.llama("8b", 256)


def t5() -> Any:
    """T5 large: 24 layers of encoder and 24 of decoder, of 1024."""
    import torch
    import transformers as hf

    config = hf.T5Config(
        d_model=1024,
        d_ff=4096,
        d_kv=64,
        num_heads=16,
        num_layers=24,
        vocab_size=32128,
        use_cache=False,
        dropout_rate=0.0,
    )
    given = torch.zeros(512, 512, dtype=torch.long, device="meta")
    return _language(config, hf.T5ForConditionalGeneration, 512, 512, decoder_input_ids=given)


def swin() -> Any:
    """Swin large: stages of 2, 2, 18 and 2 blocks."""
    import torch
    import transformers as hf

    config = hf.SwinConfig(
        embed_dim=192, depths=[2, 2, 18, 2], num_heads=[6, 12, 24, 48], num_labels=1000, drop_path_rate=0.0
    )
    with torch.device("meta"):
        model = hf.SwinForImageClassification(config).to(torch.bfloat16)
        pixels = torch.zeros(512, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.zeros(512, dtype=torch.long)
    return model, {"pixel_values": pixels, "labels": labels}


def moe() -> Any:
    """16 layers of 1024 with 16 experts each, whose routing leaves the batch free to be divided."""
    import torch

    from nnscaler.model_file import import_user_file

    module = import_user_file(planner.EXAMPLES_FOLDER / "moe.py")
    width, tokens = 1024, 1024
    ids = torch.zeros(256, tokens, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = module.MixtureOfExperts(32000, width, 0)
        model.blocks = torch.nn.ModuleList(module.Block(width, 16, 4 * width, 16, 2) for _ in range(16))
    return model.to(torch.bfloat16), {"ids": ids, "labels": ids}


def mixtral() -> Any:
    """Mixtral's shapes, with half of its layers: 16 layers of 8 experts. Its routing sorts the tokens of the batch,
    which couples samples: dp and micro-batches gain nothing."""
    import transformers as hf

    config = hf.MixtralConfig(num_hidden_layers=16, vocab_size=32000, use_cache=False, attn_implementation="sdpa")
    return _language(config, hf.MixtralForCausalLM, 256, 4096)


def evoformer() -> Any:
    """AlphaFold's widths, 12 of its 48 blocks; 128 alignments of 64 sequences of 256 residues."""
    import torch

    from nnscaler.model_file import import_user_file

    module = import_user_file(planner.EXAMPLES_FOLDER / "evoformer.py")
    config = module.EvoformerConfig(
        alignment=256, pairs=128, heads=8, pair_heads=4, outer=32, triangle=128, bins=64, reach=32, blocks=12
    )
    inputs = module.sample_inputs(batch=2, sequences=64, length=256)
    with torch.device("meta"):
        model = module.Evoformer(config)
    return model, {name: t.new_empty((128, *t.shape[1:]), device="meta") for name, t in inputs.items()}


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "swin": swin,
    "moe": moe,
    "mixtral": mixtral,
    "evoformer": evoformer,
}

# by kind of hand-written plan, the axes that it has
KINDS = {"dp": {"dp"}, "tp": {"tp"}, "pp": {"pp"}, "dp+tp+pp": {"dp", "tp", "pp"}}


def traced(name: str) -> Any:
    """The graph and its signatures."""
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.tracing import trace

    graph = trace(*MODELS[name](), self_check=False).graph
    return graph, signatures(graph)


def by_hand(graph: Any, known: Any, axes: set[str]) -> Any:
    """The constraint of a kind: what is free is what a person would try."""
    from nnscaler.planning.constraints import Constraint, all_of, megatron

    def permits(c: Any) -> bool:
        return all(axis in axes or getattr(c, axis) == 1 for axis in ("dp", "tp", "pp")) and c.recompute is not None

    sizes = Constraint("+".join(sorted(axes)), permits)
    return all_of([sizes, megatron(graph, known)]) if "tp" in axes else sizes


def seconds_of(graph: Any, known: Any, cluster: Any, constraint: Any, memory: float | None = None) -> Any:
    """Return the plan that is found, or None."""
    from nnscaler.errors import NnscalerError
    from nnscaler.planning.planner.find_plan import find_plan
    from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget

    try:
        return find_plan(graph, dict(known), cluster, constraint=constraint, memory=MemoryBudget(memory))
    except NnscalerError:
        return None


def quality(models: list[str], sizes: list[int]) -> None:
    from nnscaler.planning.cluster.description import load_cluster

    worse = rows = 0
    for name in models:
        graph, known = traced(name)
        for devices in sizes:
            cluster = load_cluster(CLUSTER).scaled(devices)
            start = time.perf_counter()
            found = seconds_of(graph, known, cluster, None)
            taken = time.perf_counter() - start
            if found is None:
                print(f"{name:<10} {devices:>4}: nothing fits")
                continue
            own = found.certificate
            others = {
                kind: seconds_of(graph, known, cluster, by_hand(graph, known, axes)) for kind, axes in KINDS.items()
            }
            gains = {kind: other.best.seconds / own.seconds for kind, other in others.items() if other is not None}
            shown = ", ".join(f"{kind} {gains[kind]:.2f}" if kind in gains else f"{kind} -" for kind in KINDS)
            best = min(gains.values(), default=float("inf"))
            rows += 1
            worse += best < 1 - 0.005  # the share at which a search ends
            print(
                f"{name:<10} {devices:>4}: {own.configuration:<52} {own.seconds:8.4g} s, gap {own.gap:6.2%}, "
                f"{taken:5.1f} s; by hand: {shown}; best {best:.3f}",
                flush=True,
            )
    print(f"{rows} rows; in {worse} a hand-written plan is faster than the planner's")


def memory(models: list[str], devices: int = 32) -> None:
    """The least memory that a pure plan takes, and what is found with less."""
    from nnscaler.planning.cluster.description import load_cluster

    cluster = load_cluster(CLUSTER).scaled(devices)
    for name in models:
        graph, known = traced(name)
        least: dict[str, float] = {}
        for kind in ("dp", "tp", "pp"):
            limit = 1e15
            while (found := seconds_of(graph, known, cluster, by_hand(graph, known, KINDS[kind]), limit)) is not None:
                least[kind] = found.best.memory
                limit = 0.9 * least[kind]
        limit = 0.85 * min(least.values())
        found = seconds_of(graph, known, cluster, None, limit)
        pure = ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in least.items())
        told = "nothing" if found is None else f"{found.certificate.configuration}, {found.best.memory / 1e9:.2f} GB"
        print(
            f"{name:<10} {devices} devices: pure plans take at least {pure}; within {limit / 1e9:.2f} GB: {told}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 32, 256])
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.memory:
        memory(options.models)
    else:
        quality(options.models, options.devices)


if __name__ == "__main__":
    main()

"""Random legal plans of the example models: every one must be exact.

    python benchmarks/random_plans.py [--gpt 400] [--others 100] [--first 0] [--models gpt llama_hf] [--kinds v-shaped]

Prints, per model, how many plans were exact, refused and wrong, the time per plan, how many plans of each kind were
drawn, and how often each row of the conversion table occurred. Exits 1 if a plan is wrong or refused, or a kind is
never drawn of a model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from tests.random_plans import (
    IN_PIECES,
    KINDS,
    MESHES,
    ON_ANY_DEVICES,
    PIPELINES,
    SLICED,
    UNLIKE,
    V_SHAPED,
    Mesh,
    random_plans,
)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DRAWN: Mapping[str, tuple[Mesh, ...]] = {
    "meshes": MESHES,
    "pipelines": PIPELINES,
    "in-pieces": IN_PIECES,
    "v-shaped": V_SHAPED,
    "sliced": SLICED,
    "on-any-devices": ON_ANY_DEVICES,
    "unlike": UNLIKE,
}
OWN = ("on-any-devices", "unlike")  # where a parameter that two stages share is illegal, in most plans
LEFT_OUT: Mapping[str, tuple[tuple[str, ...], str]] = {  # by model, what is not drawn of it
    "llama_hf": (("sliced",), "its attention has a mask that is a tensor"),
    "vit_hf": (("sliced",), "its attention looks at later patches"),
    "moe": (("sliced",), "its router is balanced over all tokens of a sequence"),
    "t5_hf": (("sliced", *OWN), "its encoder looks at later tokens, and shares its embedding with the decoder"),
}
OF_KIND = {"in-pieces": "chunk axes", "sliced": "slices", "on-any-devices": "shared stages", "unlike": "unlike meshes"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", type=int, default=400, metavar="N", help="plans of gpt.py")
    parser.add_argument("--others", type=int, default=100, metavar="N", help="plans of each other model")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--models", nargs="*", default=["gpt", "llama_hf", "vit_hf", "t5_hf", "moe"])
    parser.add_argument("--kinds", nargs="*", default=list(DRAWN), choices=list(DRAWN), help="of meshes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every: Counter[str] = Counter()
    failures = 0
    print(f"{'model':10} {'plans':>6} {'exact':>6} {'refused':>8} {'wrong':>6} {'s/plan':>7}")
    for name in options.models:
        module = load_user_module(str(EXAMPLES / f"{name}.py"))
        left_out, why = LEFT_OUT.get(name, ((), ""))
        drawn = [kind for kind in options.kinds if kind not in left_out]
        count = options.gpt if name == "gpt" else options.others
        outcomes: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        start = time.perf_counter()
        for build, meshes, seeds in _parts(module, drawn, options.first, count):
            for result in random_plans(build, module.sample_inputs(), seeds, meshes):
                outcome = "refused" if result.verdict is None else "exact" if result.verdict.passes else "wrong"
                outcomes[outcome] += 1
                kinds.update(result.kinds)
                every.update(result.rows)
                if outcome != "exact":
                    print(f"  {name} seed {result.seed} on {result.mesh}: {outcome}: {result.message}", flush=True)
        missing = [OF_KIND[kind] for kind in drawn if kind in OF_KIND and not kinds[OF_KIND[kind]]]
        failures += outcomes["wrong"] + outcomes["refused"] + len(missing)
        seconds = (time.perf_counter() - start) / max(count, 1)
        print(
            f"{name:10} {count:6} {outcomes['exact']:6} {outcomes['refused']:8} {outcomes['wrong']:6} {seconds:7.2f}",
        )
        print("  drawn: " + ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS))
        print(f"  never drawn: {', '.join(missing)}" if missing else f"  not drawn: {why or 'nothing'}", flush=True)
    print("rows: " + ", ".join(f"{row} {times}" for row, times in sorted(every.items())))
    return 1 if failures else 0


def _parts(
    module: object, kinds: list[str], first: int, count: int
) -> list[tuple[Callable[[], nn.Module], tuple[Mesh, ...], range]]:
    """Return what is drawn, how often in the measure of its meshes: of the model as it is, and with parameters of their
    own for stages that must not share them."""
    build: Callable[[], nn.Module] = module.build_model  # type: ignore[attr-defined]
    untied: Callable[[], nn.Module] = getattr(module, "build_untied", build)
    tied = tuple(mesh for kind in kinds if kind not in OWN for mesh in DRAWN[kind])
    own = tuple(mesh for kind in kinds if kind in OWN for mesh in DRAWN[kind])
    cut = first + round(count * len(tied) / max(len(tied) + len(own), 1))
    parts = [(build, tied, range(first, cut)), (untied, own, range(cut, first + count))]
    return [part for part in parts if part[1] and len(part[2])]


if __name__ == "__main__":
    sys.exit(main())

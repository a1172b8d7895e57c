"""Parse a plan that is written as axes, `dp=2,tp=2,pp=2,zero=3`: its words, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from nnscaler.errors import NnscalerError
from nnscaler.transform.plan import CP, DP, EP, PP, SHARD, TP, ZERO

OWNED, SLICES, BALANCED = "owned", "slices", "balanced"
_WORDS = ("zero", OWNED, BALANCED)  # that are no sizes
_INSIDE = (*_WORDS, EP)  # that are no ranks of their own
AXES = {
    DP: "data parallel: the batch is split, parameters are held whole",
    SHARD: "data parallel as well, inside of dp: where it is named, `zero` divides over it alone (hybrid sharding)",
    CP: "context parallel: tokens are split, and attention passes its keys and values around",
    TP: "tensor parallel: operators are split as their annotations allow, by least communication",
    PP: "pipeline parallel: layers, or else operations, are split into stages; see --micro-batches and --schedule",
    "zero": "of data parallel: optimizer states (1), gradients (2) and parameters (3, FSDP) rest in shards",
    OWNED: "of zero=1 and zero=2: each parameter rests whole on one rank, as optimizers of matrices need (owned=1)",
    BALANCED: "of pp: stages of equal work in the memory of layers, where a head makes the last one heavy (balanced=1)",
    EP: "expert parallel: of the ranks of dp, which ep divides, so many divide the experts (ep=2 is dp=2,ep=2)",
    SLICES: "of tokens, in which each micro-batch runs: slices=4, or shares of the tokens, slices=3:3:2 (TeraPipe)",
}


def parse_axes(text: str) -> dict[str, int]:
    """Return `dp=2,tp=2,pp=2,zero=3` as a dict; on one rank, where nothing can be divided, without `zero`. With `ep`
    there is `dp` as well. Slices are no axis: `parse_slices` has them.

    Raises NnscalerError("plan_illegal").
    """
    parse_slices(text)
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        if name == SLICES:
            continue
        if name not in AXES or not number.isdecimal() or int(number) < 1 or name in sizes:
            legal = {"zero": "1|2|3", OWNED: "1", BALANCED: "1"}
            wrong = f"{part!r} is not one of " + ", ".join(f"{word}={legal.get(word, 'N')}" for word in AXES)
            if name in sizes:
                wrong = f"{name} is named twice"
            elif name in AXES and number.isdecimal():
                wrong = f"{part!r} is for no ranks, and N is at least 1"
            raise NnscalerError(
                "plan_illegal",
                f"--plan {text!r}: {wrong}",
                help="for example dp=2,tp=2,pp=2; or a plan.json; or policy.py::function",
            )
        sizes[name] = int(number)
    _check_experts(text, sizes)
    over = SHARD if SHARD in sizes else DP
    if DP in sizes and ranks_in(sizes) == 1 and sizes.get("zero", 1) <= ZERO:  # a script's dp={ranks}
        for word in _WORDS:
            sizes.pop(word, None)
    if sizes.get("zero", ZERO) > ZERO or ("zero" in sizes and sizes.get(over, 1) == 1):
        raise NnscalerError(
            "plan_illegal",
            f"--plan {text!r}: zero={sizes['zero']} with {over}={sizes.get(over, 1)}",
            help="zero=1 shards optimizer states, zero=2 gradients too, zero=3 parameters too, over the ranks of dp, "
            "or of shard where it is named, of which there are two or more: dp=2,zero=1 or dp=2,shard=2,zero=3",
        )
    if OWNED in sizes and (sizes[OWNED] != 1 or sizes.get("zero") not in (1, 2)):
        message = f"--plan {text!r}: owned={sizes[OWNED]} with " + (
            f"zero={sizes['zero']}" if "zero" in sizes else "no zero"
        )
        raise NnscalerError("plan_illegal", message, help="zero=1,owned=1 or zero=2,owned=1: parameters rest on owners")
    if BALANCED in sizes and (sizes[BALANCED] != 1 or sizes.get(PP, 1) == 1):
        message = f"--plan {text!r}: balanced={sizes[BALANCED]} with " + (f"pp={sizes[PP]}" if PP in sizes else "no pp")
        raise NnscalerError(
            "plan_illegal", message, help="pp=2,balanced=1: stages of equal work, cut within layers too"
        )
    if SHARD in sizes and "zero" not in sizes:
        message = f"--plan {text!r}: shard={sizes[SHARD]} says over which ranks parameters rest in shards"
        raise NnscalerError("plan_illegal", message, help="add zero=1, zero=2 or zero=3; or take more ranks of dp")
    return sizes


def _check_experts(text: str, sizes: dict[str, int]) -> None:
    """Let dp be ep where it is not named. Raises NnscalerError("plan_illegal") where ep does not divide dp."""
    if sizes.get(EP) == 1:
        del sizes[EP]  # which divides nothing
    if EP not in sizes:
        return
    ep, dp = sizes[EP], sizes.setdefault(DP, sizes[EP])
    if SHARD in sizes:
        message = f"--plan {text!r}: ep={ep} and shard={sizes[SHARD]} both name a part of the ranks of dp"
        raise NnscalerError("plan_illegal", message, help="leave shard away: zero divides over all ranks of dp")
    if sizes.get(OWNED):
        message = f"--plan {text!r}: owned={sizes[OWNED]} with ep={ep}, which makes two axes of dp"
        raise NnscalerError("plan_illegal", message, help="leave owned away: zero=1 and zero=2 divide each parameter")
    if dp % ep:
        raise NnscalerError(
            "plan_illegal",
            f"--plan {text!r}: ep={ep} does not divide dp={dp}, whose ranks share the experts",
            help=f"ep in {[n for n in range(1, dp + 1) if dp % n == 0]}, or ep={ep} alone, which is dp={ep},ep={ep}",
        )


def parse_slices(text: str) -> tuple[int, ...]:
    """Return the shares of tokens that a specification names: of `pp=2,slices=3:3:2`, (3, 3, 2); () for none.

    Raises NnscalerError("plan_illegal").
    """
    given = [part.strip() for part in text.split(",") if part.strip().partition("=")[0] == SLICES]
    numbers = given[0].partition("=")[2].split(":") if given else []
    if not all(number.isdecimal() and int(number) > 0 for number in numbers) or numbers == ["1"] or len(given) > 1:
        wrong = "slices are named twice" if len(given) > 1 else f"{given[0]!r} says no slices"
        help = "slices=4 (two or more equal ones), or shares of the tokens: slices=3:3:2"
        raise NnscalerError("plan_illegal", f"--plan {text!r}: {wrong}", help=help)
    return (1,) * int(numbers[0]) if len(numbers) == 1 else tuple(map(int, numbers))


def ranks_in(sizes: Mapping[str, int]) -> int:
    """Return how many ranks the axes mean."""
    return prod(size for name, size in sizes.items() if name not in _INSIDE)


def parse_spec(text: str, ranks: int) -> dict[str, int]:
    """Parse as `parse_axes`.

    Raises NnscalerError("plan_illegal") as well unless the product of dp, tp and pp is `ranks`.
    """
    sizes = parse_axes(text)
    count = ranks_in(sizes)
    if count != ranks:
        options = ", ".join(",".join(f"{n}={v}" for n, v in s.items()) for s in _factorisations(ranks)[:6])
        raise NnscalerError(
            "plan_illegal",
            f"plan {text!r} is for {count} ranks, and there are {ranks}",
            help=f"the product of dp, tp and pp must be {ranks}: {options}",
        )
    return sizes


def _factorisations(ranks: int) -> list[dict[str, int]]:
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    found: list[dict[str, int]] = []
    for dp, tp in product(divisors, divisors):
        if ranks % (dp * tp) == 0:
            sizes = {DP: dp, TP: tp, PP: ranks // dp // tp}
            found.append({n: v for n, v in sizes.items() if v > 1} or {DP: 1})
    return found

"""Write what was found as a short script of plain torch and transformers, and run it with a process per rank.

The script makes the plain model, saves it, loads it again with `from_pretrained(distributed_config=...)`, and prints
every gradient that is not the plain model's. It has nothing of ours in it: who reads it needs no other tool.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nnscaler.errors import NnscalerError
from verify.external.transformers.build_program import NOISE, BuiltModel
from verify.external.transformers.find_config import fields_of, library
from verify.external.transformers.parallel_degrees import PlanSizes
from verify.external.transformers.shrink import lacking

WRONG = 1e-2  # relative error of a gradient in float32 from which the script calls it wrong; rounding gives 1e-6
_MOMENT = 3.0  # seconds that the other ranks have once one failed
_MOVED = "(held in another order)"
_LINE = re.compile(rf"^rank (\d+): (\S+) relative error (\S+) *({re.escape(_MOVED)})?$", re.MULTILINE)


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    wrong  (rank, parameter, relative error) of each gradient that it calls wrong; infinity where there is none
    moved  parameters that are held in another order than their layout says, so that their gradients say nothing
    loss   relative error of the loss, on the rank where it is largest
    error  the last line of the first rank that failed; empty where none did
    """

    wrong: tuple[tuple[int, str, float], ...]
    moved: frozenset[str]
    loss: float
    error: str

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters whose gradient is wrong on some rank."""
        return frozenset(name for _, name, _ in self.wrong)

    @property
    def is_wrong(self) -> bool:
        """True where the loss or a gradient is wrong."""
        return bool(self.wrong) or self.loss > WRONG / 10


def minimal_script(built: BuiltModel, sizes: PlanSizes, options: Mapping[str, Any]) -> str:
    """Return the script, of at most 20 lines. `options`: of the library's DistributedConfig."""
    config, model = type(built.config), type(built.model)
    ranks, part = sizes.fsdp * sizes.shared, _part(sizes)
    lines = [
        f"import os, torch, torch.distributed as dist  # torchrun --nproc_per_node {ranks} this.py; needs accelerate",
        _imports(config, model),
        'dist.init_process_group("gloo"), torch.manual_seed(0)',
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
    return "\n".join(lines).replace("MOVED", repr(_MOVED)) + "\n"


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


def run_script(text: str, ranks: int, timeout: float = 120.0) -> ScriptResult:
    """Run a script with a process per rank, as torchrun does. Raises NnscalerError `usage` without accelerate, and
    `timed_out`."""
    library()
    with tempfile.TemporaryDirectory(prefix="nnscaler-script-") as folder:
        file = Path(folder, "this.py")
        file.write_text(text, encoding="utf-8")
        shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"FOLDER": str(Path(folder, "model")), "OMP_NUM_THREADS": "1"}
        started: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with Path(folder, f"{rank}.log").open("w", encoding="utf-8") as log:
                    started.append(_start([sys.executable, str(file)], own, folder, log))
            codes = _wait_for_all(started, timeout)
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        logs = [Path(folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace") for rank in range(ranks)]
    return _result(codes, logs)


def _start(command: list[str], environment: dict[str, str], folder: str, log: IO[str]) -> subprocess.Popen[str]:
    """Start a process in a session of its own, so that all that it starts can be ended with it."""
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=log, stderr=log, text=True, start_new_session=True
    )


def _wait_for_all(started: Sequence[subprocess.Popen[str]], timeout: float) -> list[int]:
    """Wait until all have ended; when one fails, the others get a moment to say why they end, too."""
    until = time.monotonic() + timeout
    while any(process.poll() is None for process in started):
        if time.monotonic() > until:
            raise NnscalerError("timed_out", f"the script was not done in {timeout:.0f} s")
        if any(process.poll() not in (None, 0) for process in started):
            until = min(until, time.monotonic() + _MOMENT)
            _wait(started, until)
            break
        time.sleep(0.02)
    return [process.poll() or 0 for process in started]


def _wait(started: Sequence[subprocess.Popen[str]], until: float) -> None:
    while time.monotonic() < until and any(process.poll() is None for process in started):
        time.sleep(0.02)


def _result(codes: Sequence[int], logs: Sequence[str]) -> ScriptResult:
    found = [line for log in logs for line in _LINE.findall(log)]
    losses = [float(error) for _, name, error, _ in found if name == "loss"]
    moved = frozenset(name for _, name, _, moved in found if moved)
    wrong = tuple(
        (int(rank), name, float(error)) for rank, name, error, _ in found if name != "loss" and name not in moved
    )
    failed = [log for code, log in zip(codes, logs, strict=True) if code]
    return ScriptResult(wrong, moved, max(losses, default=0.0), _cause_of_end(failed) if failed else "")


def _cause_of_end(logs: Sequence[str]) -> str:
    """Return the last line of an exception, of a rank that did not fail because another one did."""
    lines = [_last_line(log) for log in logs]
    own = [line for line in lines if not any(word in line for word in ("Connection", "gloo", "DistBackendError"))]
    return (own or lines)[0]


def _last_line(log: str) -> str:
    errors = [line for line in log.splitlines() if re.match(r"^[A-Za-z_.]+(Error|Exception)\b", line)]
    return errors[-1][:300] if errors else (log.strip().splitlines() or ["it ended without a word"])[-1][:300]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

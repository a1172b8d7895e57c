"""Join a process to torch.distributed's default process group. Nothing else in the runtime reads the environment.

Under torchrun the environment says who this process is. For local jobs the launcher gives a rank and a file through
which the ranks find each other: no port has to be free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError

# The launcher and the user decide when a job takes too long: torch's own limit is set out of the way.
_NO_LIMIT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The place of this process in a job.

    rank               among all processes
    world_size         number of all processes
    local_rank         among the processes on this machine
    local_world_size   number of the processes on this machine
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def torchrun_place(environment: Mapping[str, str] | None = None) -> ProcessPlace | None:
    """Read torchrun's environment variables; None when this process was not started by it. Raises ProgramError."""
    variables = os.environ if environment is None else environment
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    missing = next((name for name in ("RANK", "WORLD_SIZE") if name not in variables), None)
    if missing:
        there = "RANK" if missing != "RANK" else "WORLD_SIZE"
        raise ProgramError(f"{there}={variables[there]} is set, and {missing} is not: torchrun sets both; or unset it")
    try:
        rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank, local_size = variables.get("LOCAL_RANK", rank), variables.get("LOCAL_WORLD_SIZE", world_size)
        place = ProcessPlace(rank, world_size, int(local_rank), int(local_size))
    except ValueError as error:
        raise ProgramError(f"RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is set wrongly: {error}") from None
    if not 0 <= place.rank < place.world_size:
        raise ProgramError(f"RANK is {place.rank} and WORLD_SIZE {place.world_size}")
    return place


def choose_device(choice: str, place: ProcessPlace) -> tuple[str, torch.device]:
    """Return backend and device: NCCL where each rank of this machine has a GPU; fewer GPUs are shared, over gloo.

    `choice`: auto, cpu or cuda. Raises ProgramError for cuda where there is none.
    """
    count = torch.cuda.device_count() if choice != "cpu" and torch.cuda.is_available() else 0
    if choice == "cuda" and not count:
        raise ProgramError("device cuda: torch finds no GPU")
    if not count:
        return "gloo", torch.device("cpu")
    backend = "nccl" if count >= place.local_world_size else "gloo"
    return backend, torch.device("cuda", place.local_rank % count)


def join(backend: str, rank: int, world_size: int, device: torch.device, store: Path | None = None) -> None:
    """Make the default process group: through the file `store`, else through torchrun's environment.

    backend: "gloo", or "nccl", which also gets gloo for tensors in host memory. Raises ProgramError where the
    environment does not say where ranks meet, CommunicationError where some of them do not come.
    """
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if store is None and not os.environ.get(name)]
    if unset:
        said = f"RANK={rank} and WORLD_SIZE={world_size} are set, and {' and '.join(unset)} not, where ranks meet"
        raise ProgramError(f"{said}: torchrun sets all; or unset the first two, to run on one process")
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=_attempt_store(world_size) if store is None else FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=_NO_LIMIT,
        )
    except (RuntimeError, ValueError) as error:  # a rank that does not come, or a port that is none
        raise CommunicationError(f"rank {rank} cannot join the others: {in_one_line(error)}", secondary=True) from error


def _attempt_store(world_size: int) -> PrefixStore | None:
    """Return where the ranks of a restart by torchrun find each other; None: where torch looks by itself.

    With its static rendezvous torchrun keeps one store for all attempts, in which the addresses of ended ranks stand.
    """
    variables = os.environ
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    agents = TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), world_size, is_master=False)
    return PrefixStore(f"attempt {attempt}", agents)


def store_of_ranks() -> Store:
    """Return where the ranks of the default process group found each other."""
    store: Store = torch.distributed.distributed_c10d._get_default_store()
    return store


def leave() -> None:
    """Destroy the default process group."""
    torch.distributed.destroy_process_group()


def local_environment() -> dict[str, str]:
    """Return the environment of processes that only talk to each other on this machine: one thread each, loopback."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"
    # Else gloo looks the machine's own name up, which fails in many containers.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # NCCL's calls wait on the host: else a rank that hangs in one seems to compute.
    environment.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    return environment

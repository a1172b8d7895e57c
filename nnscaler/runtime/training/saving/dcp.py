"""Write and read shards of logical tensors in a folder, by torch.distributed.checkpoint (DCP).

DCP stores chunks: boxes of a logical tensor. A shard is one box, or several where it is strided; a box is stored in
chunks of at most CHUNK bytes, so that a reader never holds more than one of those besides its own shards. Each rank
writes its chunks and a list of them without talking to the others, and one rank puts the lists together at the end: the
folder has no `.metadata` before it is whole. All of it is done by DCP's public planners and file system; any of
torch's own tools reads the folder.

DCP is imported when it is first used: that takes most of a second, and a rank program may need none.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner

CHUNK = 4 << 20  # bytes
METADATA = ".metadata"
Path_ = tuple[str, ...]  # where an entry stands in the nested state dict that torch's tools make of a folder


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's share of a logical tensor: one that it has, or wants to read.

    path    of the entry: ("model", "words.weight")
    shape   of the logical tensor
    boxes   that the shard consists of
    tensor  the shard
    """

    path: Path_
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor: Tensor


def whole(path: Path_, tensor: Tensor) -> TensorShard:
    """Return a tensor that this rank has alone, as a shard."""
    shape, zeros = tuple(tensor.shape), (0,) * tensor.dim()
    return TensorShard(path, shape, (Box(zeros, zeros, shape),) if tensor.numel() else (), tensor)


def key_of(path: Path_) -> str:
    """Return the name of an entry in DCP's metadata."""
    return ".".join(path)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a folder: shape and dtype of each tensor, the other objects, and where each entry stands."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    objects: tuple[str, ...]
    paths: Mapping[str, Path_]


# -- writing ------------------------------------------------------------------------------------------------------


def write_part(folder: Path, rank: int, shards: Iterable[TensorShard], objects: Mapping[Path_, object]) -> None:
    """Write this rank's entries to the folder, which is there. No two ranks write the same elements or objects.

    The part is there when its list is, which is moved into its place at the end. Raises OSError, or a RuntimeError of
    torch with it behind.
    """
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan

    planner = _save_planner(list(shards), objects)
    writer = FileSystemWriter(folder)  # it waits until the disk has each file
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    [plan], metadata = create_default_global_save_plan([planner.create_local_plan()])
    metadata.planner_data = plan.planner_data
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[-1]  # by its place there files are named
    results = writer.write_data(plan, planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def part_of(folder: Path, rank: int) -> Path:
    """Return the list of the chunks of a rank's part: the file that is there when the part is."""
    return folder / f"__{rank}{METADATA}"


def complete(folder: Path, ranks: int) -> None:
    """Put the parts of all ranks together. The folder is whole afterwards.

    Raises ProgramError where elements of a tensor are in no part.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.storage import WriteResult

    reader, merged = FileSystemReader(folder), Metadata({}, planner_data={})
    chunks: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkStorageMetadata]] = {}
    results: dict[MetadataIndex, WriteResult] = {}
    for rank in range(ranks):
        part = reader.read_metadata(rank=rank)
        for key, entry in part.state_dict_metadata.items():
            known = merged.state_dict_metadata.setdefault(key, entry)
            if isinstance(entry, TensorStorageMetadata):
                _check_same(key, known, entry)
                for chunk in entry.chunks:  # the same box from two ranks is a copy
                    chunks.setdefault(key, {}).setdefault((tuple(chunk.offsets), tuple(chunk.sizes)), chunk)
        for index, place in part.storage_data.items():
            results.setdefault(index, WriteResult(index, place.length, place))
        merged.planner_data.update(part.planner_data)
    for key, entry in merged.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            entry.chunks = list(chunks[key].values()) if key in chunks else []
            if not _covers(entry.size, entry.chunks):
                raise ProgramError(f"elements of `{key}` were written by no rank")
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.finish(merged, [list(results.values())])
    for rank in range(ranks):
        part_of(folder, rank).unlink()
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_same(key: str, known: Any, entry: Any) -> None:
    if (known.size, known.properties.dtype) != (entry.size, entry.properties.dtype):
        kinds = [f"{e.properties.dtype}{list(e.size)}" for e in (known, entry)]
        raise ProgramError(f"ranks disagree on `{key}`: it is {kinds[0]} on one and {kinds[1]} on another")


def _covers(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether the chunks make up the tensor, on the grid of all their bounds."""
    boxes = [list(zip(c.offsets, c.sizes, strict=True)) for c in chunks]
    cuts = [sorted({0, whole, *(x for b in boxes for x in (b[d][0], sum(b[d])))}) for d, whole in enumerate(size)]
    places = [{cut: i for i, cut in enumerate(c)} for c in cuts]
    found = torch.zeros([len(c) - 1 for c in cuts], dtype=torch.bool)
    for box in boxes:
        found[tuple(slice(at[start], at[start + n]) for at, (start, n) in zip(places, box, strict=True))] = True
    return bool(found.all())


def _chunks(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, along its first dims."""
    if prod(box.sizes) <= limit:
        yield box
        return
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    step = max(1, limit // prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], step):
        move = tuple(start if d == dim else 0 for d in range(len(box.sizes)))
        sizes = tuple(min(step, n - start) if d == dim else n for d, n in enumerate(box.sizes))
        part = Box(_add(box.offsets, move), _add(box.local, move), sizes)
        yield from _chunks(part, limit)


def _add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _save_planner(shards: Sequence[TensorShard], objects: Mapping[Path_, object]) -> SavePlanner:
    """Return a planner that writes these entries. (Its class cannot be defined before DCP is imported.)"""
    from torch.distributed.checkpoint import planner as dcp
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

    class Planner(dcp.SavePlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            """Nothing: the entries are known."""

        def create_local_plan(self) -> dcp.SavePlan:
            self.data: dict[MetadataIndex, Tensor | object] = {}
            items: list[dcp.WriteItem] = []
            for shard in shards:
                properties = TensorProperties(dtype=shard.tensor.dtype)
                for box in shard.boxes:
                    for chunk in _chunks(box, max(1, CHUNK // shard.tensor.element_size())):
                        index = MetadataIndex(key_of(shard.path), torch.Size(chunk.offsets))
                        self.data[index] = chunk.of(shard.tensor.detach())
                        place = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        written = dcp.TensorWriteData(place, properties, torch.Size(shard.shape))
                        items.append(dcp.WriteItem(index, dcp.WriteItemType.SHARD, tensor_data=written))
            for path, value in objects.items():
                index = MetadataIndex(key_of(path))
                self.data[index] = value
                items.append(dcp.WriteItem(index, dcp.WriteItemType.BYTE_IO))
            paths = {key_of(path): path for path in (*(s.path for s in shards), *objects)}
            return dcp.SavePlan(items, planner_data=paths)

        def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
            return create_default_global_save_plan(all_plans)

        def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
            return new_plan

        def resolve_data(self, write_item: dcp.WriteItem) -> Tensor | io.BytesIO:
            found = self.data[write_item.index]
            if write_item.type == dcp.WriteItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(found, stream)
                return stream
            assert isinstance(found, Tensor)
            return found

    return Planner()


# -- reading ------------------------------------------------------------------------------------------------------


class Folder:
    """A whole folder, open for reading. Every rank reads by itself, what it asks for and no more.

    Objects are unpickled: read folders that you trust. Raises ProgramError for what is no whole checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.path = Path(path)
        if not (self.path / METADATA).is_file():
            raise ProgramError(f"{path} is no checkpoint: it has no {METADATA}")
        self._reader = FileSystemReader(self.path)
        with self._told():
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
            entries = self._metadata.state_dict_metadata
            tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        self.contents = Contents(
            {key: (tuple(entry.size), entry.properties.dtype) for key, entry in tensors.items()},
            tuple(key for key in entries if key not in tensors),
            {key: tuple(map(str, path)) for key, path in (self._metadata.planner_data or {}).items()},
        )

    def read(self, shards: Iterable[TensorShard], objects: Iterable[str] = ()) -> dict[str, Any]:
        """Fill the shards in place, converting dtypes, and return the objects.

        Raises ProgramError, which names the entry, for one that is missing or has another shape.
        """
        wanted, keys = [shard for shard in shards if prod(shard.shape)], tuple(objects)
        for shard in wanted:
            found = self.contents.tensors.get(key_of(shard.path))
            if found is None:
                raise ProgramError(f"{self.path} has no `{shard.path[-1]}`")
            if found[0] != shard.shape:
                kinds = f"{list(found[0])} in it, and {list(shard.shape)} here"
                raise ProgramError(f"{self.path}: `{shard.path[-1]}` is {kinds}")
        lacking = next((key for key in keys if key not in self.contents.objects), None)
        if lacking is not None:
            raise ProgramError(f"{self.path} has no `{lacking}`")
        values: dict[str, Any] = {}
        planner = _load_planner(self._metadata.state_dict_metadata, wanted, keys, values)
        with self._told():
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        return values

    def _told(self) -> _FileErrors:
        return _FileErrors(self.path)


class _FileErrors:
    """Turn what goes wrong with the files of a checkpoint into a ProgramError that names the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ProgramError):
            told = in_one_line(error)
            raise ProgramError(f"{self._path} cannot be read, it may be cut short: {told}") from error


def _load_planner(
    entries: Mapping[str, Any], shards: Sequence[TensorShard], objects: Sequence[str], values: dict[str, Any]
) -> LoadPlanner:
    """Return a planner that reads each chunk that shards overlap once, and puts its parts where they belong."""
    from torch.distributed.checkpoint import planner as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex

    class Planner(dcp.LoadPlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            """Nothing: the entries are known."""

        def create_local_plan(self) -> dcp.LoadPlan:
            self.parts = _overlaps(entries, shards)
            items = [self._item(index, parts) for index, parts in self.parts.items()]
            items += [_read(dcp, dcp.LoadItemType.BYTE_IO, MetadataIndex(key), (0,)) for key in objects]
            return dcp.LoadPlan(items)

        def _item(self, index: MetadataIndex, parts: list[tuple[TensorShard, dcp.ReadItem]]) -> dcp.ReadItem:
            """Read a chunk straight into the shard if one box of it takes it; by way of the chunk if several do."""
            if len(parts) == 1:
                return parts[0][1]
            return _read(dcp, dcp.LoadItemType.TENSOR, index, entries[index.fqn].chunks[index.index].sizes)

        def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
            return global_plan

        def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
            return central_plan

        def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
            values[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

        def resolve_tensor(self, read_item: dcp.ReadItem) -> Tensor:
            parts = self.parts[read_item.storage_index]
            if len(parts) == 1:
                return self._target(*parts[0])
            return torch.empty(read_item.lengths, dtype=entries[read_item.storage_index.fqn].properties.dtype)

        def commit_tensor(self, read_item: dcp.ReadItem, tensor: Tensor) -> None:
            parts = self.parts[read_item.storage_index]
            for shard, item in parts if len(parts) > 1 else ():
                self._target(shard, item).copy_(Box((), tuple(item.storage_offsets), tuple(item.lengths)).of(tensor))

        def _target(self, shard: TensorShard, item: dcp.ReadItem) -> Tensor:
            assert item.dest_index.index is not None
            box = shard.boxes[item.dest_index.index]
            return Box((), _add(box.local, item.dest_offsets), tuple(item.lengths)).of(shard.tensor.detach())

    return Planner()


def _overlaps(
    entries: Mapping[str, Any], shards: Sequence[TensorShard]
) -> dict[MetadataIndex, list[tuple[TensorShard, ReadItem]]]:
    """Return, for each stored chunk that is needed, what the boxes of shards take of it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    found: dict[MetadataIndex, list[tuple[TensorShard, ReadItem]]] = {}
    for shard in shards:
        key = key_of(shard.path)
        held = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in shard.boxes]
        for item in create_read_items_for_chunk_list(key, entries[key], held):
            found.setdefault(item.storage_index, []).append((shard, item))
    return found


def _read(dcp: Any, kind: Any, index: MetadataIndex, lengths: Sequence[int]) -> ReadItem:
    """Return the request for all of an entry. `dcp`: the module of planners."""
    zeros = torch.Size([0] * len(lengths))
    item: ReadItem = dcp.ReadItem(kind, index, zeros, index, zeros, torch.Size(lengths))
    return item

"""Build one stage of a program: the versions of its tensors, and the statements that make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, count

from nnscaler.communication.communicated_graph import Convert, Feed, StageMessage, Statement, Stored, Version
from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import ConversionStep, find_path
from nnscaler.ir.graph import Graph, is_free_name
from nnscaler.ir.operation_placement import Chunk, Stage
from nnscaler.layout import INVARIANT, Layout, Sharded, format_layout

Scope = bool | Chunk  # `prepare` (True), `forward` (False), or a piece of a region


@dataclass
class StageBuilder:
    """Mutable while a program is built; `materialise` freezes it. Versions made for `prepare`, for `forward` and for
    the pieces of a region are kept apart: a version of the one is not in scope in the other. `border`: the position of
    the region that is being built in `forward`; None between regions."""

    graph: Graph
    stage: Stage
    stored: list[Stored] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    prepare_feeds: list[Feed] = field(default_factory=list)
    prepare: list[Statement] = field(default_factory=list)
    forward: list[Statement] = field(default_factory=list)
    receives: list[StageMessage] = field(default_factory=list)
    sends: list[StageMessage] = field(default_factory=list)
    prepared: dict[str, Version] = field(default_factory=dict)
    versions: dict[Scope, dict[str, dict[Layout, Version]]] = field(default_factory=lambda: {False: {}, True: {}})
    names: set[str] = field(default_factory=set)
    border: int | None = None

    def variable(self, tensor: str) -> str:
        """Return a fresh name: the tensor's, or that with a number."""
        base = "".join(c if f"a{c}".isidentifier() else "_" for c in tensor)
        taken = (*self.stage.names, "range") if self.stage.time_axes else self.stage.names  # pieces are counted by it
        if not is_free_name(base) or base in taken:
            base = f"t_{base}"
        name = next(n for n in chain([base], (f"{base}_v{i}" for i in count(1))) if n not in self.names)
        self.names.add(name)
        return name

    def add(self, tensor: str, layout: Layout, prepare: Scope = False, variable: str | None = None) -> Version:
        """Declare a version."""
        version = Version(tensor, layout, variable or self.variable(tensor))
        self.versions.setdefault(prepare, {}).setdefault(tensor, {})[layout] = version
        return version

    def known(self, tensor: str, prepare: Scope = False) -> dict[Layout, Version]:
        """Return the versions of a tensor in scope, by layout."""
        return self.versions.get(prepare, {}).get(tensor, {})

    def path(self, source: Layout, target: Layout, tensor: str) -> tuple[float, tuple[ConversionStep, ...]] | None:
        """Return the cheapest conversion on this stage's mesh."""
        described = self.graph.tensors[tensor]
        return find_path(
            source, target, self.stage.sizes, described.shape, described.needs_grad, self.stage.first_in_time
        )

    def cheapest(
        self, tensor: str, target: Layout, prepare: Scope = False
    ) -> tuple[float, Version, tuple[ConversionStep, ...]] | None:
        """Return the version from which the target layout is reached at the least cost."""
        best: tuple[float, Version, tuple[ConversionStep, ...]] | None = None
        for layout, version in self.known(tensor, prepare).items():
            found = self.path(layout, target, tensor)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], version, found[1])
        return best

    def emit(self, statement: Statement, prepare: Scope = False) -> None:
        """Add a statement. What a region reads is made before it, and not in each of its pieces."""
        if prepare is True:
            self.prepare.append(statement)
        elif prepare is False and self.border is not None:
            self.forward.insert(self.border, statement)
            self.border += 1
        else:
            self.forward.append(statement)

    def convert(self, version: Version, moves: tuple[ConversionStep, ...], prepare: Scope = False) -> Version:
        """Emit the moves; every intermediate layout becomes a version that others may start from."""
        for move in moves:
            there = self.known(version.tensor, prepare).get(move.target)
            if there is None:
                there = self.add(version.tensor, move.target, prepare)
                chunk = prepare if isinstance(prepare, Chunk) else None
                self.emit(Convert(version, there, move, chunk), prepare)
            version = there
        return version

    def feed(self, tensor: str, layout: Layout, prepare: bool) -> None:
        """Cut a piece of an input out of the global batch: any sharded or whole layout, without communication."""
        fed = tuple(s if isinstance(s, Sharded) else INVARIANT for s in layout)
        if fed in self.known(tensor, prepare):
            return
        version = self.add(tensor, fed, prepare)
        (self.prepare_feeds if prepare else self.feeds).append(Feed(version))

    def obtain(self, tensor: str, layout: Layout, prepare: Scope = False) -> Version:
        """Return the version of `tensor` in `layout`, converting one that there is if need be."""
        there = self.known(tensor, prepare).get(layout)
        if there is not None:
            return there
        if self.graph.tensors[tensor].role == "input" and not isinstance(prepare, Chunk):
            self.feed(tensor, layout, prepare)
        best = self.cheapest(tensor, layout, prepare)
        if best is None:
            have = [format_layout(v, self.stage.names) or "Invariant" for v in self.known(tensor, prepare)]
            raise NnscalerError(
                "no_conversion",
                f"tensor {tensor} is needed as ({format_layout(layout, self.stage.names) or 'Invariant'}) "
                f"and there is no legal conversion from {have}",
            )
        return self.convert(best[1], best[2], prepare)

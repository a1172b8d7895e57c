"""The right programs, by name."""

from __future__ import annotations

from collections.abc import Mapping

from verify.external.program import ExternalProgram
from verify.self_test.external import hand_rows, pipeline_rows, replicated_rows, sharded_rows, tensor_rows

_TABLES = (tensor_rows, sharded_rows, replicated_rows, pipeline_rows, hand_rows)
PROGRAMS: Mapping[str, ExternalProgram] = {name: p for table in _TABLES for name, p in table.PROGRAMS.items()}
assert len(PROGRAMS) == sum(len(table.PROGRAMS) for table in _TABLES), "two programs have one name"

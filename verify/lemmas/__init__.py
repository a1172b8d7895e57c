"""L1: the lemmas that a proof of a program relies on, and the sizes that it holds for."""

from verify.lemmas.memo import Memo, open_memo
from verify.lemmas.obligation import Obligation, obligations_of
from verify.lemmas.prove import prove_obligations
from verify.lemmas.result import Lemma, LemmaResult
from verify.lemmas.rows import check_rows
from verify.lemmas.sizes import SizesResult, Symbol, sizes_result

__all__ = [
    "Lemma",
    "LemmaResult",
    "Memo",
    "Obligation",
    "SizesResult",
    "Symbol",
    "check_rows",
    "obligations_of",
    "open_memo",
    "prove_obligations",
    "sizes_result",
]

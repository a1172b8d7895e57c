"""L1: the lemmas that a proof of a program relies on, and the sizes that it holds for."""

from verify.programs.lemmas.conversions_and_their_adjoints import check_rows
from verify.programs.lemmas.find_sizes_where_program_proof_holds import SizesResult, Symbol, sizes_result
from verify.programs.lemmas.prove import hangs_on_sizes, prove_obligations
from verify.programs.lemmas.result import Lemma, LemmaResult, Memo, open_memo

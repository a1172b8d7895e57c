"""Proof level (b): for all values at small, fixed sizes, Z3 shows that shards make up the whole.

This is bounded verification, in the sense of bounded model checking (Biere et al. 1999): complete in the values,
bounded in the sizes.

For operators whose call is rewritten for each rank, and for hand-written index arithmetic: what a proof for all sizes
does not reach. `prove.prove_bounded` is the entrance.
"""

"""Prove an external program from the graph of one of its ranks, against the graph of the plain model.

Both are traced on fake tensors: forward and backward, collectives included. Nothing is computed, so that a model of
405B parameters on 1,024 ranks takes as long as its Python code. What is shown holds at the traced sizes, for every
value.

The idea
--------
A tensor of a rank is a logical tensor of the model in a layout: per mesh axis, the whole (Same), a shard, or a term
of a sum. `verify.programs.typing` (L0) reads programs of our own in this way, where one state speaks of a value and
of its gradient. Here the backward pass stands in the graph as any other calls do, so that a state speaks of a value
alone, and gradients are followed like everything else. The states and what operators make of them are those of the
proofs of `verify-op` (`verify.evidence.dimension_types`): one rule per ATen operator, forward and backward, each held
against torch by a fuzz. L0 itself does not apply: its lines are operators before autograd, and DTensor's text begins
below it.

    facts       what is known of a rank's tensor: coefficient x term, one state per axis (`facts.py`)
    terms       logical tensors, each different one once, whatever the order of sums (`terms.py`, `call_normal_form.py`)
    rules       from the states of operands to those of results, axis by axis (`result_states_of_rank_call.py`,
                `attention_rms_norm_loss_rules.py`)
    conversions all_reduce, all_gather, reduce_scatter, all_to_all, slices (`facts.py`,
                `follow_layouts_in_rank_graph.py`)
    ends        loss, gradients and buffers: the right term, once, in the layout of their placements
                (`premises_and_goals.py`)

A worked example
----------------
`down(gelu(up(x)))` over tp = 2, `up` by columns and `down` by rows, as rank 0 of 2 runs it, and what is known:

    t        (16, 32)   up.weight.T      Shard(1)                up.weight is Shard(0) by its placements
    mm       (8, 32)    mm(x, t)         Shard(1)                (8, 16) x (16, 32 k) -> (8, 32 k)
    gelu     (8, 32)    gelu(mm)         Shard(1)                entry by entry
    mm_1     (8, 16)    mm(gelu, t_1)    PartialSum              the contracted dim is split
    all_reduce          mm(gelu, t_1)    Same                    the row PartialSum -> Same of the table
    mm_2     (32, 16)   up.weight's grad Shard(0)                the model's own `mm(grad.T, x)`, in the backward pass

Without the `all_reduce`, the norm behind it reads a PartialSum, and is not linear: no layout of the model's norm
comes out of it. That is REFUTED, with the line. With two of them the coefficient is 2, and no term of the model's is
found: the verdict is INCONCLUSIVE, and names the first operator. A gradient that ends as a PartialSum, or as twice
the model's, is REFUTED too: a true statement about it says that it is not the model's.

What a data part's mean is worth
--------------------------------
A rank that has half of the rows computes the mean over its own. `mean` is `1/n * sum`, and n is the rank's: the
coefficient becomes 2 and the state PartialSum, through the backward pass, up to the all_reduce by mean. The mean of a
loss over labels divides by a count that depends on values: that all parts count as many is a condition, told and
looked up in the batch.

Numbers of a rank's own
-----------------------
One graph says nothing of a `split(x)[0]`: is it rank 0's shard or the first of three projections? So a second rank is
traced (a third where two axes could be meant): the graphs have to be one text, and what differs follows a coordinate
(`rank_graph.py`).

What it does not do
-------------------
It compares one step: loss, gradients, and what the step writes to. Clipping and the optimizer are left to runs.
FSDP2's hooks move parameters beside the dispatcher, and pipelines are no one graph: INCONCLUSIVE, with the reason; a
SimpleFSDP-like parametrisation is followed. Shards of unequal sizes, draws of random numbers and what has no rule
likewise. Never is something taken for the model's that is not shown to be. `ASSUMED` (`prove.py`) says what it rests
on.

Sources: abstract interpretation (Cousot and Cousot 1977); value numbering by hash-consing; layouts as in GSPMD (Xu et
al. 2021) and DTensor.
"""

from verify.external.proof.prove import ASSUMED, ExternalProof, prove_external

__all__ = ["ASSUMED", "ExternalProof", "prove_external"]

"""What autograd keeps for a pathway, and that recomputing it changes nothing. The kinds of R5, R7 and R9.

Shapes: B batch, T token, D width.
"""

from __future__ import annotations

import torch

from darlit.pathways import build
from pathways.cases import BRANCHES, VARIANTS, randn

B, T, WIDE = 3, 7, 256


def saved_vectors(variant: str, dtype: torch.dtype, branches: int) -> tuple[float, float]:
    """What the pathway alone saves per token for the backward pass, in vectors of D channels of the streams' dtype.

    Returns tensors of D channels, each storage once, and all smaller ones. Branch outputs are made outside: they
    count once each where a pathway keeps them. Tensors without tokens (parameters, their casts) do not count.
    """
    name, options = VARIANTS[variant]
    pathway = build(name, num_branches=branches, width=WIDE, **options)
    embedding = randn(B, T, WIDE, seed=0, dtype=dtype).requires_grad_()
    outputs = [randn(B, T, WIDE, seed=1 + i, dtype=dtype).requires_grad_() for i in range(branches)]
    large: dict[int, int] = {}
    small: dict[int, int] = {}

    def pack(tensor):
        if tensor.shape[:2] == (B, T) or tensor.shape[:1] == (B * T,):
            storage = tensor.untyped_storage()
            (large if tensor.shape[-1] == WIDE else small)[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state = pathway.start(embedding)
        for i, output in enumerate(outputs):
            state.read(i)
            state.write(i, output)
        final = state.finish()
    assert final.requires_grad
    unit = embedding.numel() * embedding.element_size()
    return sum(large.values()) / unit, sum(small.values()) / unit

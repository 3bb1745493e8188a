"""What autograd keeps for a pathway, and that recomputing it changes nothing. The kinds of R5, R7 and R9.

Shapes: B batch, T token, D width.
"""

from __future__ import annotations

import torch

from darlit.pathways import build
from pathways.cases import BRANCHES, VARIANTS, randn

WIDE = 256


def saved_vectors(variant: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes that the pathway alone saves for the backward pass, in ``[B, T, D]`` tensors of the streams' dtype.

    Returns those of D channels, each storage once, and those of all smaller ones. Branch outputs are made outside:
    they count once each where a pathway keeps them.
    """
    name, options = VARIANTS[variant]
    pathway = build(name, num_branches=BRANCHES, width=WIDE, **options)
    embedding = randn(2, 8, WIDE, seed=0, dtype=dtype).requires_grad_()
    outputs = [randn(2, 8, WIDE, seed=1 + i, dtype=dtype).requires_grad_() for i in range(BRANCHES)]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in pathway.parameters()}
    large: dict[int, int] = {}
    small: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            (large if tensor.ndim >= 2 and tensor.shape[-1] == WIDE else small)[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state = pathway.start(embedding)
        for i, output in enumerate(outputs):
            state.read(i)
            state.write(i, output)
        state.finish()
    unit = embedding.numel() * embedding.element_size()
    return sum(large.values()) / unit, sum(small.values()) / unit

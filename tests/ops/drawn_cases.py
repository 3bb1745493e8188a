"""Random histories for property tests, run by any implementation and by the oracle in float64."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from darlit import pathways

ROUTES = ("dar", "self_kv", "cross_v", "fixed_kv")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NARROW = torch.float16 if INTERPRETED else torch.bfloat16
"""Where errors add up over many branches: the interpreter cuts bfloat16 off where kernels round it."""


@st.composite
def cases(draw: Any, widened: bool = False, deep: bool = False) -> dict[str, Any]:
    """A pathway, its options and what flows through it.

    ``widened``: Hyper-Connections too. ``deep``: so many small blocks that some of any
    case's reads take two phases.
    """
    layers = draw(st.integers(12, 14) if deep else st.integers(1, 4))
    name = draw(st.sampled_from(("dar", "attnres", "mhc", "hyper_connections") if widened else ("dar", "attnres")))
    # The norm of one channel is its sign: what is left of its gradient is rounding over the channel's size.
    narrowest = 2 if name == "hyper_connections" else 1
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(narrowest, 70)))
    options: dict[str, Any] = {}
    if name == "mhc":
        options = {"num_streams": draw(st.integers(1, 5)), "dynamic_scale": 0.5}
    elif name == "hyper_connections":
        options = {"num_streams": draw(st.integers(1, 4)), "connections": draw(st.sampled_from(("static", "dynamic")))}
    elif name == "dar":
        options = {
            "query_init_std": 0.02,
            "block_size": draw(st.integers(1, 2 if deep else layers)),
            "route": draw(st.sampled_from(ROUTES)),
            "gates": draw(st.sampled_from(("static", "dynamic"))),
            "carry_partial": draw(st.booleans()),
        }
        if options["block_size"] > 1:
            options["include_partial"] = draw(st.booleans())
    else:
        options = {
            "query_init_std": 0.02,
            "block_size": draw(st.integers(1, 2) if deep else st.integers(0, layers)),
            "num_queries": draw(st.integers(1, 2 if deep else 3)),
            "sep_v": draw(st.booleans()),
        }
    layout = draw(st.sampled_from(("contiguous", "wide rows", "transposed", "expanded")))
    return {
        "name": name,
        "num_branches": 2 * layers,
        "shape": shape,
        "options": options,
        "layout": layout,
        "seed": draw(st.integers(0, 2**16)),
    }


def run(case: dict[str, Any], implementation: str, dtype: torch.dtype, compute: torch.dtype) -> dict[str, Tensor]:
    """Every read, and the gradients of embedding, branch outputs and parameters; drawn in ``dtype``."""
    generator = torch.Generator().manual_seed(case["seed"])

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(compute)

    branches, (batch, tokens, width) = case["num_branches"], case["shape"]
    pathway = pathways.build(
        case["name"], num_branches=branches, width=width, implementation=implementation, **case["options"]
    )
    for parameter in pathway.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * case.get("parameter_std", 0.3)
    if compute == torch.float64:
        pathway = pathway.double()

    leaves = {"embedding": drawn(batch, tokens, width).requires_grad_()}
    outputs = []
    for branch in range(branches):
        leaf, output = _laid_out(case["layout"], drawn, batch, tokens, width)
        leaves[f"output {branch}"] = leaf
        outputs.append(output)
    state = pathway.start(leaves["embedding"])
    reads = []
    for branch in range(branches):
        reads.append(state.read(branch))
        state.write(branch, outputs[branch])
    reads.append(state.finish())
    torch.autograd.backward(reads, [drawn(batch, tokens, width) for _ in reads])

    leaves |= dict(pathway.named_parameters())
    values = {f"read {i}": read.detach() for i, read in enumerate(reads)}
    return values | {f"gradient of {key}": leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


def _laid_out(layout: str, drawn: Any, batch: int, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """A leaf and the branch output ``[batch, tokens, width]`` that is a view of it."""
    if layout == "wide rows":
        leaf = drawn(batch, tokens, width + 3).requires_grad_()
        return leaf, leaf[..., 1 : width + 1]
    if layout == "transposed":
        leaf = drawn(tokens, width, batch).requires_grad_()
        return leaf, leaf.permute(2, 0, 1)
    if layout == "expanded":
        leaf = drawn(width).requires_grad_()
        return leaf, leaf.expand(batch, tokens, width)
    leaf = drawn(batch, tokens, width).requires_grad_()
    return leaf, leaf


def check(case: dict[str, Any], implementation: str, dtype: torch.dtype) -> None:
    """Fresh memory is NaN, so an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True)  # also fills what torch.empty returns
    try:
        got = run(case, implementation, dtype, dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = run(case, "reference", dtype, torch.float64)
    plain = run(case, "reference", dtype, dtype)
    assert got.keys() == expected.keys()
    batch, tokens, width = case["shape"]
    for key, exact in expected.items():
        # A parameter's gradient sums over tokens and channels terms of about one in size: such a sum has the size of
        # the root of their number, and where it cancels that is what a rounding error is to be compared with.
        terms = batch * tokens * width if "_" in key else 1  # a parameter's name ends in its shape
        scale = max(exact.norm().item(), (exact.numel() * terms) ** 0.5)
        error, of_reference = ((of[key].double() - exact).norm().item() / scale for of in (got, plain))
        # A few narrow channels have no others to even out how each rounding falls: the reference shows how it may.
        allowed = max(TOLERANCE[dtype], 2 * of_reference)
        assert error <= allowed, f"{key}: {error:.1e}, the reference {of_reference:.1e}"

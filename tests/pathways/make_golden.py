"""Writes the golden tensors: ``python tests/pathways/make_golden.py`` (float64, one JSON file a variant).

They pin the arms for which no independent implementation is public. Numbers come from sines, not from a random
generator, so that they mean the same under any version of torch. Make them again only when the mathematics changes on
purpose, and say so in the changelog.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darlit.pathways import build

FOLDER = Path(__file__).parent / "golden"
BRANCHES, WIDTH = 6, 4
GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "dar_full": ("dar", {}),
    "dar_block": ("dar", {"block_size": 2}),
    "dar_self_kv": ("dar", {"route": "self_kv"}),
    "dar_cross_v": ("dar", {"route": "cross_v"}),
    "dar_fixed_kv": ("dar", {"route": "fixed_kv", "query_init_std": 0.02}),
    "dar_dynamic": ("dar", {"block_size": 2, "gates": "dynamic"}),
    "attnres_sep_v": ("attnres", {"block_size": 1, "sep_v": True}),
    "denseformer": ("denseformer", {}),
    "denseformer_sparse": ("denseformer", {"dilation": 2, "period": 2}),
}


def wave(*shape: int, phase: float) -> Tensor:
    """Numbers between -1 and 1 that any machine computes alike."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.double)
    return torch.sin(1.7 * count + phase).view(shape)


def compute(variant: str) -> dict[str, Any]:
    """The final hidden state and the gradient of its weighted sum for every parameter, after a fixed offset of each."""
    name, options = GOLDEN[variant]
    pathway = build(name, num_branches=BRANCHES, width=WIDTH, norm_eps=1e-6, **options).double()
    pathway.reset_parameters()
    with torch.no_grad():
        for order, (parameter_name, parameter) in enumerate(pathway.named_parameters()):
            start = torch.zeros_like(parameter) if parameter_name == "queries_JRD" else parameter.clone()
            parameter.copy_(start + 0.4 * wave(*parameter.shape, phase=order))
    weights = [wave(WIDTH, WIDTH, phase=10.0 + i) for i in range(BRANCHES)]
    state = pathway.start(wave(1, 3, WIDTH, phase=0.5))
    for i, weight in enumerate(weights):
        state.write(i, torch.tanh(state.read(i) @ weight))
    final = state.finish()
    (final * wave(*final.shape, phase=3.0)).sum().backward()
    gradients = {name: parameter.grad.tolist() for name, parameter in pathway.named_parameters()}
    return {"final": final.tolist(), "gradients": gradients}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for variant in GOLDEN:
        (FOLDER / f"{variant}.json").write_text(json.dumps(compute(variant)) + "\n", encoding="utf-8")

"""Any pathway around any branches: they only have to return the shape and dtype that they were given."""

from __future__ import annotations

import torch
from torch import nn

import darlit.pathways

WIDTH, BRANCHES = 32, 6


def main() -> None:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BRANCHES)]
    embedding = torch.randn(2, 10, WIDTH)  # [batch, seq, width]

    for name in darlit.pathways.names():
        pathway = darlit.pathways.build(name, num_branches=BRANCHES, width=WIDTH)
        state = pathway.start(embedding)
        for i, branch in enumerate(branches):
            state.write(i, branch(state.read(i)))
        hidden = state.finish()
        parameters = sum(parameter.numel() for parameter in pathway.parameters())
        print(f"{name:18} {tuple(hidden.shape)}, {parameters} parameters, mean square {hidden.square().mean():.3f}")


if __name__ == "__main__":
    main()

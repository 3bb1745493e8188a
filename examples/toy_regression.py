"""Dual Attention Residuals on a toy regression, in plain PyTorch: no Lightning, no text, no Transformer.

Sixteen small branches learn y = sin(3 x_1) x_2 + |x_3|: the same branches, from the same start, once with the
standard residual and once with DAR. A toy: it shows how the parts fit together, not which pathway is better.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import darlit.pathways
from darlit.pathways import Probe

WIDTH, BRANCHES = 32, 16


class Regressor(nn.Module):
    """``[batch, 3]`` to ``[batch]``: a stack of branches, and a pathway between them."""

    def __init__(self, pathway_name: str, **options: object) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(BRANCHES)
        )
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 1))
        self.pathway = darlit.pathways.build(pathway_name, num_branches=BRANCHES, width=WIDTH, **options)

    def forward(self, points: Tensor, probe: Probe | None = None) -> Tensor:
        state = self.pathway.start(self.embed(points).unsqueeze(1), probe)  # [batch, 1, width]: one token a point
        for i, branch in enumerate(self.branches):
            state.write(i, branch(state.read(i)))
        return self.head(state.finish())[:, 0, 0]


class Gates(Probe):
    """Collects how much of stream 0 every branch reads."""

    def __init__(self) -> None:
        self.alphas: list[float] = []

    def gate(self, name: str, branch: int, value: Tensor) -> None:
        if name == "alpha":
            self.alphas.append(value.mean().item())


def target(points: Tensor) -> Tensor:
    return torch.sin(3 * points[:, 0]) * points[:, 1] + points[:, 2].abs()


def train(model: Regressor, steps: int) -> float:
    """Mean squared error on points that were not trained on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        points = torch.randn(256, 3, generator=generator)
        loss = (model(points) - target(points)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    points = torch.randn(2048, 3, generator=generator)
    with torch.no_grad():
        return (model(points) - target(points)).square().mean().item()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(arguments).steps

    errors = {}
    for name in ("residual", "dar"):
        torch.manual_seed(0)
        model = Regressor(name)
        errors[name] = train(model, steps)
        print(f"{name:9} mean squared error {errors[name]:.4f} after {steps} steps")

    gates = Gates()
    with torch.no_grad():
        model(torch.randn(256, 3), gates)
    print("alpha of dar, branch by branch:", " ".join(f"{alpha:.2f}" for alpha in gates.alphas))
    return errors


if __name__ == "__main__":
    main()

"""The 7B sparse experiments: their shape on the meta device, and a real training step of a cut-down one."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from darlit.experiment import load_experiment
from darlit.modules import LanguageModule
from darlit.modules.arms import MODULES

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
ARMS = ("residual", "attnres_block", "mhc2", "dar")
MEMORY_LIMIT_GIB = 20


def module(arm: str, **backbone: Any) -> LanguageModule:
    experiment = load_experiment(EXPERIMENTS / f"moe7b_{arm}.yaml")
    options = experiment["model"]["init_args"]
    shape = {**options["backbone"], "sequence_length": experiment["data"]["sequence_length"], **backbone}
    variant = MODULES[experiment["model"]["class_path"]]
    return variant(pathway=options.get("pathway", {}), backbone=shape, optimizer=options["optimizer"])  # type: ignore[call-arg]


@pytest.mark.parametrize("arm", ARMS)
def test_it_has_the_parameters_that_its_name_says(arm: str) -> None:
    with torch.device("meta"):
        transformer = module(arm, experts="torch").transformer
    total = sum(parameter.numel() for parameter in transformer.parameters())
    pathway = sum(parameter.numel() for parameter in transformer.pathway.parameters())
    idle = sum(layer.feed_forward.gate.numel() * 3 * 56 // 64 for layer in transformer.layers)
    assert total == pytest.approx(6.9e9, rel=0.01)
    assert total - idle == pytest.approx(1.3e9, rel=0.02)
    assert pathway <= 0.01 * total


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_a_training_step_at_full_width(arm: str) -> None:
    """2 of the 16 layers and 8 of the 64 experts, in a process of its own, whose memory is measured."""
    result = subprocess.run([sys.executable, __file__, arm], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-2000:]
    loss, moved, gibibytes = map(float, result.stdout.split()[-3:])
    print(f"{arm}: loss {loss:.3f}, peak {gibibytes:.1f} GiB")
    assert loss == pytest.approx(10.9, abs=0.5), "about ln(50304), and the routers' losses"
    assert moved == 1, "every parameter has a gradient or, by design, none of the tokens"
    assert gibibytes < MEMORY_LIMIT_GIB


def train_one_step(arm: str) -> None:
    torch.manual_seed(0)
    model = module(arm, num_layers=2, num_experts=8, experts="torch")
    optimizer = torch.optim.AdamW(model.transformer.parameters(), lr=4e-4)
    ids = torch.randint(0, model.backbone.vocab_size, (1, model.backbone.sequence_length + 1))
    losses = model.transformer.losses(ids[:, :-1], ids[:, 1:])
    total = losses.total(model.backbone)
    total.backward()
    finite = all(bool(p.grad.isfinite().all()) for p in model.transformer.parameters() if p.grad is not None)
    reached = all(p.grad is not None for p in model.transformer.layers.parameters())
    optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(float(total.detach()), int(finite and reached), peak)


if __name__ == "__main__":
    train_one_step(sys.argv[1])

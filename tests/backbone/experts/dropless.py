"""Run by `test_dropless_interpreted` with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from backbone.experts.cases import CONFIG, LOADS, assert_close, experts, run, tokens
from darlit import pathways
from darlit.backbone import Transformer
from darlit.backbone.experts import compiled_parts
from darlit.modules.sharding import shard

TWO_LAYERS = replace(CONFIG, norm_eps=1e-6)


@pytest.fixture(autouse=True)
def kernels_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Proof that megablocks' own kernels ran."""
    compiled_parts.provide()
    from megablocks.backend import kernels

    launched: list[str] = []
    for name in ("gather", "scatter", "scatter_wgrad"):
        kernel: Any = getattr(kernels, name)

        def spy(*arguments: Any, name: str = name, kernel: Any = kernel) -> Any:
            launched.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(kernels, name, spy)
    yield launched
    assert {"gather", "scatter", "scatter_wgrad"} <= set(launched)


@pytest.mark.parametrize("load", LOADS)
def test_the_layer_equals_the_loop(load: str) -> None:
    found, wanted = run(experts("megablocks", load), tokens(load)), run(experts("reference", load), tokens(load))
    assert_close(found, wanted, 1e-5)


def test_normalised_weights() -> None:
    found, wanted = (run(experts(e, normalize_expert_weights=True), tokens()) for e in ("megablocks", "reference"))
    assert_close(found, wanted, 1e-5)


def model(backend: str, recompute: bool = False) -> Transformer:
    torch.manual_seed(0)
    pathway = pathways.build("dar", num_branches=4, width=CONFIG.width)
    return Transformer(replace(TWO_LAYERS, experts=backend, checkpoint_layers=recompute), pathway)  # type: ignore[arg-type]


def step(transformer: Transformer) -> dict[str, torch.Tensor]:
    """Parameters, losses and gradients of a training step, an evaluation before it."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 17), generator=generator)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-2)
    with torch.no_grad():
        transformer.eval().loss(ids[:, :-1], ids[:, 1:])
    losses = transformer.train().losses(ids[:, :-1], ids[:, 1:])
    losses.total(transformer.config).backward()
    gradients = {
        f"gradient of {name}": p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None
    }
    optimizer.step()
    assert losses.routing is not None
    return {
        "counts": losses.routing.tokens_per_expert_E,
        "cross entropy": losses.cross_entropy.detach(),
        "load balancing": losses.routing.load_balancing.detach(),
        "z": losses.routing.z.detach(),
        **gradients,
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_a_training_step_with_dual_attention_residuals(recompute: bool) -> None:
    assert_close(step(model("megablocks", recompute)), step(model("reference")), 1e-5)


def test_a_sharded_training_step(tmp_path: Path) -> None:
    """One rank: parameters come and go as under FSDP2 on many, and megablocks computes on what is gathered."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        sharded = model("megablocks", recompute=True)
        shard(sharded, init_device_mesh("cpu", (1,)), torch.device("cpu"), "32-true")
        found = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in step(sharded).items()}
        assert isinstance(sharded.layers[0].feed_forward.gate, DTensor)
    finally:
        dist.destroy_process_group()
    assert_close(found, step(model("reference")), 1e-5)


def test_a_checkpoint_moves_between_backends() -> None:
    ours, theirs = model("torch"), model("megablocks")
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value), f"{name} starts otherwise"
    theirs.load_state_dict(ours.state_dict())
    theirs(torch.zeros(1, 4, dtype=torch.long)).sum().backward()

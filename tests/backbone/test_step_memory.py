"""The memory that a step is estimated to need is what a real one takes on this CPU, tensor for tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.backbone.step_memory import Placement, activation_bytes, checkpoint_bytes, step_memory
from darlit.bench.measure import saved_bytes
from darlit.errors import DarlitError
from darlit.live_tensors import PeakMemory
from darlit.pathways.table import ARMS

SMALL = BackboneConfig(vocab_size=257, num_layers=8, width=256, num_heads=4, ffn_width=704, sequence_length=256)
"""The shape of the CPU evidence grid."""
SPARSE = replace(SMALL, num_layers=4, ffn_width=192, num_experts=8, experts_per_token=2, tie_embeddings=False)
CPU = Placement("32-true", "cpu")
QUICK = ("residual", "denseformer", "attnres_full", "attnres_block", "mhc2", "dar_full", "dar_block")


def build(arm: str, config: BackboneConfig) -> Transformer:
    name, options = ARMS[arm]
    implementation = {"implementation": "auto"} if len(pathways.families()[name].implementations) > 2 else {}
    pathway = pathways.build(
        name,
        num_branches=config.num_branches,
        width=config.width,
        norm_eps=config.norm_eps,
        **implementation,
        **options,
    )
    return Transformer(config, pathway)


def tokens(config: BackboneConfig, batch: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (batch, config.sequence_length))


def measured_peak(model: Transformer, batch: int, narrow: bool = False) -> int:
    """Most bytes that a real forward and backward pass adds to parameters and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens_BT = tokens(model.config, batch)
    held = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters()), tokens_BT]
    with PeakMemory([tensor for tensor in held if tensor is not None]) as memory:
        before = memory.live
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            loss = model.losses(tokens_BT, tokens_BT).total(model.config)
        loss.backward()
    return memory.peak - before


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("arm", [pytest.param(arm, marks=() if arm in QUICK else pytest.mark.slow) for arm in ARMS])
def test_activations_of_small_are_those_of_a_real_step(arm: str, recompute: bool) -> None:
    model = build(arm, replace(SMALL, checkpoint_layers=recompute))
    assert activation_bytes(model, 1, CPU) == pytest.approx(measured_peak(model, 1), rel=0.05)


@pytest.mark.parametrize("arm", ["residual", "dar_full", "mhc2"])
def test_most_of_it_is_what_autograd_keeps(arm: str) -> None:
    model, tokens_BT = build(arm, SMALL), tokens(SMALL, 1)
    kept = saved_bytes(lambda: model.loss(tokens_BT, tokens_BT), [*model.parameters(), *model.buffers()])
    assert kept <= activation_bytes(model, 1, CPU) <= 1.1 * kept


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("arm", ["residual", "dar_block"])
def test_experts_are_counted_as_they_run(arm: str, recompute: bool) -> None:
    model = build(arm, replace(SPARSE, checkpoint_layers=recompute))
    assert activation_bytes(model, 2, CPU) == pytest.approx(measured_peak(model, 2), rel=0.05)


def test_a_shallow_model_is_counted_to_the_byte_in_mixed_precision_too() -> None:
    shallow = replace(SMALL, num_layers=2, width=64, ffn_width=96, sequence_length=16)
    for precision in ("32-true", "bf16-mixed"):
        model = build("dar_full", shallow)
        expected = measured_peak(model, 2, narrow=precision == "bf16-mixed")
        assert activation_bytes(model, 2, Placement(precision, "cpu")) == expected


def test_the_meta_device_counts_the_same() -> None:
    with torch.device("meta"):
        bare = build("dar_block", SMALL)
    assert step_memory(bare, 1, CPU) == step_memory(build("dar_block", SMALL), 1, CPU)


def test_the_estimate_draws_no_random_number_and_changes_no_gradient() -> None:
    model = build("residual", replace(SMALL, num_layers=2))
    state = torch.get_rng_state()
    activation_bytes(model, 1, CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parts_by_hand() -> None:
    model = build("residual", replace(SMALL, num_layers=2))
    count = sum(parameter.numel() for parameter in model.parameters())
    root = 257 * 256 + 256
    layer = (count - root) // 2

    def parts(**place: Any) -> tuple[int, int, int, int]:
        memory = step_memory(model, 1, Placement(**place))
        return memory.parameters, memory.gradients, memory.optimizer, memory.communication

    assert parts(precision="32-true") == (4 * count, 4 * count, 8 * count, 0)
    assert parts(precision="bf16-true") == (2 * count, 2 * count, 4 * count, 0)
    assert parts(precision="32-true", devices=3) == (4 * count, 4 * count, 8 * count, 4 * count)
    shard = 4 * -(-count // 3)
    gathered = layer * (2 * 2 + 2 + 4) + 2 * 4 * root
    assert parts(precision="bf16-mixed", devices=3, sharded=True) == (shard, shard, 2 * shard, gathered)
    assert checkpoint_bytes(model, "bf16-mixed") == 3 * 4 * count


def test_sharded_branches_travel_narrow() -> None:
    """Autocast keeps a bf16 copy of every matrix for the backward pass; FSDP2 gathers them as bf16."""
    model = build("residual", replace(SMALL, num_layers=2))
    whole, sharded = (Placement("bf16-mixed", "cuda", 2, sharded) for sharded in (False, True))
    assert activation_bytes(model, 1, sharded) < activation_bytes(model, 1, whole)


def test_a_precision_without_an_estimate_is_refused() -> None:
    with pytest.raises(DarlitError, match="precision '16-mixed' is not known .* bf16-mixed"):
        Placement("16-mixed")

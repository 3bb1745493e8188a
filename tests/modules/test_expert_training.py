"""Auxiliary losses in training: counted once, whatever recomputes, accumulates or validates in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader

from cells import fit, run_folder, summary, write_cell
from darlit.backbone import BackboneConfig
from darlit.callbacks.expert_load import expert_load
from darlit.modules.arms import DualAttentionResidualLM, ResidualLM
from darlit.pathways.dar import DarOptions

BACKBONE = BackboneConfig(
    vocab_size=50, num_layers=2, width=16, num_heads=2, ffn_width=16, sequence_length=8,
    num_experts=4, experts_per_token=2, load_balancing_weight=0.5, router_z_weight=0.1,
)  # fmt: skip
SPARSE = {
    "model__init_args__backbone__num_experts": 4,
    "model__init_args__backbone__experts_per_token": 2,
}


def module(**changes: Any) -> DualAttentionResidualLM:
    torch.manual_seed(0)
    return DualAttentionResidualLM(DarOptions(), replace(BACKBONE, **changes))


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(seed))


def gradients(model: pl.LightningModule, *batches: Tensor) -> dict[str, Tensor]:
    """Of the mean over micro-batches, as a training step makes them."""
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    for tokens in batches:
        (model.training_step(tokens, 0)["loss"] / len(batches)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def test_recomputed_layers_count_once() -> None:
    assert_equal(gradients(module(checkpoint_layers=True), batch()), gradients(module(), batch()))


def test_two_equal_micro_batches_are_as_one() -> None:
    assert_equal(gradients(module(), batch(), batch()), gradients(module(), batch()))


def test_two_micro_batches_are_the_mean_of_both() -> None:
    one, two = gradients(module(), batch(0)), gradients(module(), batch(1))
    assert_equal(gradients(module(), batch(0), batch(1)), {name: (one[name] + two[name]) / 2 for name in one})


def test_an_evaluation_in_between_changes_nothing() -> None:
    model = module()
    with torch.no_grad():
        model.eval().transformer.loss(batch(1)[:, :-1], batch(1)[:, 1:])
        model.train()
    assert_equal(gradients(model, batch()), gradients(module(), batch()))


@pytest.mark.parametrize("name", ["load_balancing_weight", "router_z_weight"])
def test_each_auxiliary_loss_pulls_at_the_router(name: str) -> None:
    router = "transformer.layers.1.feed_forward.router.weight"
    both, without = gradients(module(), batch())[router], gradients(module(**{name: 0.0}), batch())[router]
    other = {"load_balancing_weight", "router_z_weight"} - {name}
    neither = gradients(module(**{name: 0.0, other.pop(): 0.0}), batch())[router]
    assert (both - without).norm() > 1e-3 * both.norm()
    assert neither.norm() > 0, "the router learns from the tokens' loss too"


def test_the_optimiser_sees_the_weighted_sum_and_the_curve_the_cross_entropy() -> None:
    model = module()
    outputs = model.training_step(batch(), 0)
    wanted = outputs["cross_entropy"] + 0.5 * outputs["load_balancing"] + 0.1 * outputs["router_z"]
    assert float(outputs["loss"].detach()) == pytest.approx(float(wanted), rel=1e-6)
    assert outputs["tokens_per_expert"].sum().item() == 2 * 4 * 8 * 2


def trained(folder: Path, micro_batch: int, validations: int) -> dict[str, Tensor]:
    """Weights after three steps on 8 equal sequences, in one or in two micro-batches, by the real trainer."""
    torch.manual_seed(0)
    model = ResidualLM(backbone=BACKBONE)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=3, accumulate_grad_batches=8 // micro_batch, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        val_check_interval=1 if validations else None, check_val_every_n_epoch=None if validations else 1,
    )  # fmt: skip
    data = batch()[:1].expand(24, -1)
    trainer.fit(model, DataLoader(data, micro_batch), DataLoader(data, micro_batch) if validations else None)
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


@pytest.mark.parametrize(("micro_batch", "validations"), [(4, 0), (8, 1), (4, 1)])
def test_training_is_the_same_with_accumulation_and_validation(
    tmp_path: Path, micro_batch: int, validations: int
) -> None:
    wanted = trained(tmp_path, micro_batch=8, validations=0)
    found = trained(tmp_path, micro_batch, validations)
    for name, value in wanted.items():
        if not name.startswith(("val_metric", "test_metric")):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_sparse_cell_writes_its_loads_and_a_curve_of_cross_entropy(data_folder: Path, tmp_path: Path) -> None:
    cell = write_cell(tmp_path, data_folder, "dar_full", budget__batch_tokens=512, budget__tokens=5120, **SPARSE)
    assert fit(cell) == 0
    events = EventAccumulator(str(run_folder(cell)), size_guidance={"histograms": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for layer in ("layer_00", "layer_01"):
        assert {f"experts/{name}/{layer}" for name in ("max_over_mean", "entropy", "dropped")} <= tags
        assert all(event.value == 0 for event in events.Scalars(f"experts/dropped/{layer}"))
        assert all(1 <= event.value <= 4 for event in events.Scalars(f"experts/max_over_mean/{layer}"))
        histogram = events.Histograms(f"experts/load/{layer}")[0].histogram_value
        assert histogram.bucket_limit == [1.0, 2.0, 3.0, 4.0]
        assert sum(histogram.bucket) == pytest.approx(4)
    assert {"train/load_balancing_loss", "train/router_z_loss"} <= tags
    # Two micro-batches a step: a curve of halved losses would start at half of ln(257).
    assert summary(run_folder(cell))["curve"]["train"]["loss"][0] == pytest.approx(5.55, abs=0.15)


def test_expert_load_by_hand() -> None:
    loads = expert_load(torch.tensor([[4.0, 4, 4, 4], [8, 8, 0, 0]], dtype=torch.double), assigned=16)
    assert loads["experts/max_over_mean/layer_00"] == 1
    assert loads["experts/entropy/layer_00"] == pytest.approx(1)
    assert loads["experts/max_over_mean/layer_01"] == 2
    assert loads["experts/entropy/layer_01"] == pytest.approx(0.5)
    assert expert_load(torch.tensor([[6.0, 6]]), assigned=16)["experts/dropped/layer_00"] == 0.25

"""The LightningModule: checkpoints of plain values, metrics, and the table of classes."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from darlit import pathways
from darlit.backbone import BackboneConfig
from darlit.errors import DarlitError
from darlit.modules import LanguageModule
from darlit.modules.arms import MODULES, DualAttentionResidualLM, ResidualLM
from darlit.modules.metrics import TokenLoss
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways.dar import DarOptions
from darlit.pathways.table import ARMS
from trained import poison

BACKBONE = BackboneConfig(vocab_size=50, num_layers=2, width=16, num_heads=2, ffn_width=24, sequence_length=8)


def trainer(folder: Path, steps: int = 2, **options: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": steps,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "gradient_clip_val": 1.0,
    }
    return pl.Trainer(**{**given, **options})


def batches() -> DataLoader:
    return DataLoader(torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0)), batch_size=4)


def test_a_checkpoint_rebuilds_its_module_with_weights_only(tmp_path: Path) -> None:
    module = DualAttentionResidualLM(DarOptions(block_size=2, route="self_kv"), BACKBONE)
    run = trainer(tmp_path)
    run.fit(module, batches())
    run.save_checkpoint(tmp_path / "some.ckpt")
    loaded = DualAttentionResidualLM.load_from_checkpoint(tmp_path / "some.ckpt", weights_only=True)
    assert loaded.pathway_options == module.pathway_options
    assert loaded.backbone == BACKBONE
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_the_base_class_loads_a_checkpoint_of_any_arm(tmp_path: Path) -> None:
    module = DualAttentionResidualLM(DarOptions(block_size=2, route="self_kv"), BACKBONE)
    run = trainer(tmp_path)
    run.fit(module, batches())
    run.save_checkpoint(tmp_path / "some.ckpt")
    for arguments in ({}, {"weights_only": True}, {"map_location": "cpu", "strict": True}):
        loaded = LanguageModule.load_from_checkpoint(str(tmp_path / "some.ckpt"), **arguments)
        assert type(loaded) is DualAttentionResidualLM
        for name, value in module.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
    with pytest.raises(
        DarlitError, match=r"some\.ckpt holds pathway 'dar', not one of ResidualLM; load it with Language"
    ):
        ResidualLM.load_from_checkpoint(tmp_path / "some.ckpt")
    with pytest.raises(DarlitError, match=r"other\.ckpt does not exist"):
        LanguageModule.load_from_checkpoint(tmp_path / "other.ckpt")


def test_load_from_checkpoint_runs_no_code_of_the_file(tmp_path: Path) -> None:
    """Whatever ``weights_only`` says."""
    run, sign = trainer(tmp_path), tmp_path / "sign"
    run.fit(ResidualLM(backbone=BACKBONE), batches())
    (tmp_path / "checkpoints").mkdir()
    run.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    poison(tmp_path, sign)
    for weights_only in (True, False, None):
        with pytest.raises(DarlitError, match=r"last\.ckpt is refused: not a checkpoint of plain tensors"):
            LanguageModule.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", weights_only=weights_only)
    assert not sign.exists()


class CompiledLM(DualAttentionResidualLM):
    """Parts wrapped where a user would: ``wrap`` names them."""

    wrap: tuple[str, ...] = ()

    def configure_model(self) -> None:
        for name in self.wrap:
            parent, _, child = name.rpartition(".")
            owner = self.get_submodule(parent)
            setattr(owner, child, torch.compile(owner.get_submodule(child), backend="eager"))


@pytest.mark.parametrize(
    "wrap",
    [
        ("transformer.layers.0", "transformer.layers.1"),
        ("transformer.layers.0.attention", "transformer.layers.1.feed_forward"),
        ("transformer",),
        ("transformer.layers.1", "transformer"),
    ],
    ids=" ".join,
)
def test_wrapped_parts_keep_the_names_and_values_of_a_checkpoint(
    tmp_path: Path, wrap: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, saved and resumed as the module without wrappers: same keys, same groups, bitwise the same weights."""
    monkeypatch.setattr(CompiledLM, "wrap", wrap)
    states = {}
    for name, arm in (("plain", DualAttentionResidualLM), ("wrapped", CompiledLM)):
        torch.manual_seed(0)
        module = arm(backbone=BACKBONE)
        run = trainer(tmp_path, steps=2)
        run.fit(module, batches())
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
        groups = [
            (group["name"], len(group["params"]), group["weight_decay"]) for group in run.optimizers[0].param_groups
        ]
        states[name] = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"], groups
    assert list(states["wrapped"][0]) == list(states["plain"][0])
    assert states["wrapped"][1] == states["plain"][1]
    for name, value in states["plain"][0].items():
        torch.testing.assert_close(states["wrapped"][0][name], value, rtol=0, atol=0)
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "wrapped.ckpt")
    torch.testing.assert_close(loaded.state_dict(), states["plain"][0], rtol=0, atol=0)
    resumed = CompiledLM(backbone=BACKBONE)
    trainer(tmp_path, steps=3).fit(resumed, batches(), ckpt_path=tmp_path / "wrapped.ckpt", weights_only=True)
    straight = DualAttentionResidualLM(backbone=BACKBONE)
    trainer(tmp_path, steps=3).fit(straight, batches(), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(DualAttentionResidualLM(DarOptions(), BACKBONE), batches())
    run.save_checkpoint(tmp_path / "some.ckpt")
    with pytest.raises(DarlitError, match="pathway.name is 'dar' there and 'residual' here"):
        trainer(tmp_path, 4).fit(
            ResidualLM(backbone=BACKBONE), batches(), ckpt_path=tmp_path / "some.ckpt", weights_only=True
        )


def test_what_changes_speed_only_does_not_refuse_a_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(DualAttentionResidualLM(DarOptions(), BACKBONE), batches())
    run.save_checkpoint(tmp_path / "some.ckpt")
    checkpoint = torch.load(tmp_path / "some.ckpt", weights_only=True)
    slower = replace(BACKBONE, implementation="reference", checkpoint_layers=True)
    other = DualAttentionResidualLM(DarOptions(), slower)
    assert other.transformer.pathway.implementation == "reference"
    other.check_checkpoint(checkpoint)


def test_prediction_gives_the_loss_of_every_token() -> None:
    module = ResidualLM(backbone=BACKBONE)
    tokens = next(iter(batches()))
    losses = module.predict_step(tokens, 0)
    assert losses.shape == (4, 8)
    torch.testing.assert_close(losses.mean(), module.transformer.loss(tokens[:, :-1], tokens[:, 1:]))


def test_token_loss_weighs_batches_by_their_tokens_and_bytes() -> None:
    """Token 0 has four bytes, token 1 two, token 2 (a separator) none; -100 is no target at all."""
    metric = TokenLoss()
    metric.token_bytes = torch.tensor([4, 2, 0])
    metric.update(torch.tensor(2.0), torch.zeros(3, 10, dtype=torch.long))
    metric.update(torch.tensor(4.0), torch.tensor([[1] * 8 + [2] * 2, [-100] * 10]))
    values = metric.compute()
    assert values["tokens"] == 40
    assert values["loss"] == pytest.approx(2.5)
    assert values["perplexity"] == pytest.approx(math.exp(2.5))
    assert values["bytes_per_token"] == pytest.approx((30 * 4 + 8 * 2) / 40)
    assert values["bits_per_byte"] == pytest.approx(40 * 2.5 / math.log(2) / (30 * 4 + 8 * 2))


def test_a_row_that_does_not_count_changes_no_loss() -> None:
    module, tokens = ResidualLM(backbone=BACKBONE), next(iter(batches()))
    filler = torch.full_like(tokens[:1], -100)
    for padded in (torch.cat([tokens, filler]), tokens):
        module.validation_step(padded, 0)
    values = module.val_metric.compute()
    assert values["tokens"] == 2 * 4 * 8
    torch.testing.assert_close(values["loss"].float(), module.transformer.loss(tokens[:, :-1], tokens[:, 1:]))
    assert (module.predict_step(filler, 0) == 0).all()
    module.val_metric.reset()
    module.validation_step(filler, 0)
    assert module.val_metric.loss_sum == module.val_metric.tokens == 0


def test_every_pathway_has_a_class() -> None:
    assert {module.pathway_name for module in MODULES.values()} == set(pathways.names())


def test_gradients_are_clipped_with_a_fused_optimizer_in_mixed_precision(tmp_path: Path) -> None:
    """The precision of every GPU cell; Lightning's own clipping refuses the optimizer there."""
    norms = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
            logged = trainer.callback_metrics["train/grad_norm"]
            norms.append((logged, torch.nn.utils.get_total_norm(p.grad for p in pl_module.parameters())))

    options = {"precision": "bf16-mixed", "gradient_clip_val": 1e-2, "callbacks": [Look()]}
    trainer(tmp_path, **options).fit(ResidualLM(backbone=BACKBONE), batches())
    assert len(norms) == 2
    for logged, clipped in norms:
        assert logged > 0.1
        assert clipped == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_a_precision_that_loses_or_scales_gradients_is_refused(precision: str) -> None:
    module = ResidualLM()
    module._trainer = type("Trainer", (), {"precision": precision})()  # a CPU never gets there by itself
    with pytest.raises(DarlitError, match=f"precision={precision} is not allowed"):
        module.setup("fit")


def test_a_precision_that_keeps_gains_at_one_is_warned_about_in_training_only(tmp_path: Path) -> None:
    """AdamW at 5e-4 leaves every gain at exactly 1: the warning is true."""
    run = trainer(tmp_path, steps=2, precision="bf16-true")
    module = ResidualLM(backbone=BACKBONE, optimizer=OptimizerConfig(learning_rate=5e-4))
    with pytest.warns(UserWarning, match="precision=bf16-true: .* gains that start at 1 do not move"):
        run.fit(module, batches())
    gains = [value for name, value in module.named_parameters() if name.endswith("norm.weight")]
    assert gains
    assert all((gain == 1).all() for gain in gains)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bf16-true")
        trainer(tmp_path, precision="bf16-true").predict(module, batches())


def test_every_arm_starts_from_the_same_backbone() -> None:
    """Also one whose pathway draws random values of its own."""

    def backbone(pathway: str, options: dict[str, object]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        arm = next(module for module in MODULES.values() if module.pathway_name == pathway)
        module = arm(pathway=options, backbone=BACKBONE)  # type: ignore[call-arg]
        return {name: value for name, value in module.transformer.state_dict().items() if "pathway" not in name}

    expected = backbone("residual", {})
    for pathway, options in ARMS.values():
        for name, value in backbone(pathway, options).items():
            assert torch.equal(value, expected[name]), (pathway, name)

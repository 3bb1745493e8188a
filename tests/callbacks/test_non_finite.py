"""NaN and infinity never reach the weights: stop with a name, or skip up to a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cells import fit, run_folder, write_cell
from darlit.callbacks.non_finite import NonFiniteGuard
from darlit.errors import DarlitError
from darlit.modules.language_module import LanguageModule


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], in_gradient: bool = False) -> None:
    """Make the loss, or one gradient, infinite at the given steps."""
    original = LanguageModule.training_step

    def step(self: LanguageModule, tokens: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        outputs = original(self, tokens, batch_idx)
        if self.global_step not in steps:
            return outputs
        if in_gradient:
            weight = self.transformer.layers[1].attention.out.weight
            return {**outputs, "loss": outputs["loss"] + (weight - weight.detach()).sum() * float("inf")}
        return {name: value * float("nan") for name, value in outputs.items()}

    monkeypatch.setattr(LanguageModule, "training_step", step)


def guard_options(**options: Any) -> list[str]:
    return [f"--non_finite.{name}={value}" for name, value in options.items()]


def test_a_bad_gradient_stops_with_its_name_and_good_weights(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {7}, in_gradient=True)
    experiment = write_cell(tmp_path, data_folder)
    with pytest.raises(
        DarlitError, match=r"step 7: gradient of transformer.layers.1.attention.out.weight is not finite"
    ) as caught:
        fit(experiment)
    assert "documents of the batch: " in str(caught.value)
    assert ".txt #" in str(caught.value)
    saved = torch.load(run_folder(experiment) / "checkpoints" / "before_non_finite.ckpt", weights_only=True)
    assert saved["global_step"] == 7
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values())
    assert not (run_folder(experiment) / "summary.json").exists()


def test_a_bad_weight_is_named(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LanguageModule.on_train_start

    def spoil(self: LanguageModule) -> None:
        original(self)
        with torch.no_grad():
            self.transformer.layers[0].feed_forward.out.weight[0, 0] = float("nan")

    monkeypatch.setattr(LanguageModule, "on_train_start", spoil)
    with pytest.raises(DarlitError, match="step 0: parameter transformer.layers.0.feed_forward.out.weight"):
        fit(write_cell(tmp_path, data_folder))


def test_skipping_goes_on_and_counts(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {3, 9})
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment, *guard_options(on_non_finite="skip", limit=2)) == 0
    saved = torch.load(run_folder(experiment) / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["callbacks"]["NonFiniteGuard"] == {"skipped": 2}
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values())


def test_skipping_ends_at_its_limit(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {3, 4, 5})
    with pytest.raises(DarlitError, match="step 5"):
        fit(write_cell(tmp_path, data_folder), *guard_options(on_non_finite="skip", limit=2))


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(DarlitError, match="on_non_finite='ignore'"):
        NonFiniteGuard(on_non_finite="ignore")  # type: ignore[arg-type]

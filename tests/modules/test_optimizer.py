"""Parameter groups and the learning-rate schedule."""

from __future__ import annotations

from typing import Any

import pytest

from darlit.errors import DarlitError
from darlit.modules.arms import DualAttentionResidualLM
from darlit.modules.optimizer import OptimizerConfig, parameter_groups, schedule_factor


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    module = DualAttentionResidualLM()
    transformer = module.transformer
    backbone = [child for name, child in transformer.named_children() if name != "pathway"]
    config = OptimizerConfig(learning_rate=1e-3, pathway_lr_multiplier=3.0)
    groups = {group["name"]: group for group in parameter_groups(backbone, transformer.pathway, config)}
    names = {id(parameter): name for name, parameter in transformer.named_parameters()}
    grouped = {key: {names[id(parameter)] for parameter in group["params"]} for key, group in groups.items()}
    assert sum(len(group["params"]) for group in groups.values()) == len(names)
    assert set().union(*grouped.values()) == set(names.values())

    assert grouped["pathway"] == {name for name in names.values() if name.startswith("pathway.")}
    assert groups["pathway"]["weight_decay"] == 0.0
    assert groups["pathway"]["lr"] == pytest.approx(3e-3)
    assert "embedding.weight" in grouped["embeddings_and_gains"]
    assert groups["embeddings_and_gains"]["weight_decay"] == 0.0
    assert all(name.endswith(("norm.weight", "embedding.weight")) for name in grouped["embeddings_and_gains"])
    assert groups["matrices"]["weight_decay"] == 0.1
    assert all(parameter.ndim == 2 for parameter in groups["matrices"]["params"])


def test_cosine_warms_up_peaks_and_ends_at_its_floor() -> None:
    factor = schedule_factor(OptimizerConfig(warmup_fraction=0.1, final_fraction=0.1), total_steps=100)
    assert factor(0) == pytest.approx(0.1)
    assert factor(9) == pytest.approx(1.0)
    assert factor(10) == pytest.approx(1.0, abs=1e-3)
    assert factor(54) == pytest.approx(0.55)
    assert factor(99) == pytest.approx(0.1)
    assert all(factor(step) >= factor(step + 1) for step in range(9, 100))


def test_warmup_stable_decay_stays_flat_then_falls_linearly() -> None:
    config = OptimizerConfig(
        schedule="warmup_stable_decay", warmup_fraction=0.1, decay_fraction=0.2, final_fraction=0.0
    )
    factor = schedule_factor(config, total_steps=100)
    assert [factor(step) for step in (10, 50, 79)] == pytest.approx([1.0, 1.0, 1.0])
    assert factor(80) < 1.0
    assert factor(89) == pytest.approx(0.5)
    assert factor(99) == 0.0


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay"])
@pytest.mark.parametrize("steps", [2, 3, 20, 100, 6198])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_last_step_has_exactly_the_final_fraction(schedule: Any, steps: int, final: float) -> None:
    """Also under torch's scheduler, which asks for the rate of one step more."""
    factor = schedule_factor(OptimizerConfig(schedule=schedule, final_fraction=final), steps)
    assert factor(steps - 1) == factor(steps) == final
    assert max(factor(step) for step in range(steps)) == 1.0
    if final < 1:
        assert factor(steps - 2) > final


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "linear"}, ["schedule='linear'", "cosine"]),
        ({"warmup_fraction": 2.0}, ["warmup_fraction=2.0", "between 0 and 1"]),
        ({"learning_rate": -1.0}, ["learning_rate=-1.0", "at least 0"]),
    ],
)
def test_bad_options_are_named(options: dict, words: list[str]) -> None:
    with pytest.raises(DarlitError) as caught:
        OptimizerConfig(**options)
    assert all(word in str(caught.value) for word in words)

"""What an analysis leaves: ``<name>.json``, its pictures as PNG and SVG, and the same pictures in TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from darlit.analysis.questions import Question
from darlit.analysis.tokens import TokenBatches
from darlit.atomic import write_text
from darlit.modules.loading import SavedModel
from darlit.probes import pictures


def write(
    out: Path,
    question: Question,
    models: Mapping[str, SavedModel],
    tokens: Mapping[str, TokenBatches],
    answers: Mapping[str, Any],
) -> list[Path]:
    """Write everything about one question; mappings are by the models' names. Returns the files."""
    entries = [
        {
            "name": name,
            "path": str(models[name].path),
            "step": models[name].step,
            "pathway": {"name": models[name].module.pathway_name, **models[name].module.hparams["pathway"]},
            "data": tokens[name].source,
            **question.record(answer),
        }
        for name, answer in answers.items()
    ]
    content = json.dumps(_defined({"analysis": question.name, "models": entries}), indent=1, allow_nan=False)
    written = [out / f"{question.name}.json"]
    write_text(written[0], content + "\n")
    drawings = question.pictures(answers)
    for stem, draw in drawings.items():
        written += pictures.save(draw, out / stem)
    _log_images(
        out, {stem: pictures.as_image(draw) for stem, draw in drawings.items()}, max(m.step for m in models.values())
    )
    return written


def _log_images(folder: Path, images: Mapping[str, Any], step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, pixels in images.items():
            writer.add_image(f"analysis/{name}", pixels, global_step=step, dataformats="HWC")


def _defined(value: Any) -> Any:
    """The same with null for numbers that are not defined."""
    if isinstance(value, dict):
        return {key: _defined(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_defined(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

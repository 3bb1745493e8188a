"""What an analysis leaves: ``<name>.json``, its pictures as PNG and SVG, and the same pictures in TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from darlit.analysis.questions import QUESTIONS, Question
from darlit.analysis.tokens import TokenBatches
from darlit.atomic import write_text
from darlit.errors import DarlitError
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
    images = [pictures.save(draw, out / stem) for stem, draw in question.pictures(answers).items()]
    _log_images(out, [png for png, _ in images], step=max(saved.step for saved in models.values()))
    return [*written, *(path for pair in images for path in pair)]


class Redrawn(NamedTuple):
    """One analysis, once more from its JSON file."""

    title: str
    headlines: list[str]
    """A line a model."""
    pictures: list[Path]


def redraw(folder: Path) -> list[Redrawn]:
    """Draw the pictures of every analysis in ``folder`` once more, as PNG, from the numbers alone.

    Raises:
        DarlitError: a file that no analysis wrote.
    """
    return [_redraw(folder, kind()) for kind in QUESTIONS if (folder / f"{kind.name}.json").is_file()]


def _redraw(folder: Path, question: Question) -> Redrawn:
    file = folder / f"{question.name}.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["models"]
        answers = {entry["name"]: question.restore(entry) for entry in entries}
    except (KeyError, TypeError, ValueError) as error:
        raise DarlitError(f"'{file}' is no result of darlit analyze ({error!r}); write it again") from error
    drawings = question.pictures(answers).items()
    return Redrawn(
        question.title,
        [f"{name}: {question.headline(answer)}" for name, answer in answers.items()],
        [pictures.save(draw, folder / stem, kinds=("png",))[0] for stem, draw in drawings],
    )


def _log_images(folder: Path, images: Sequence[Path], step: int) -> None:
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for path in images:
            writer.add_image(f"analysis/{path.stem}", imread(path)[:, :, :3], global_step=step, dataformats="HWC")


def _defined(value: Any) -> Any:
    """The same with null for numbers that are not defined."""
    if isinstance(value, dict):
        return {key: _defined(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_defined(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

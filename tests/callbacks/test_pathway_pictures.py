"""Pictures in TensorBoard: when, which, and that training never feels them."""

from __future__ import annotations

import gc

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cells import fit, run_folder, weights, write_cell
from darlit.callbacks.pathway_pictures import PathwayPictures, _drawings
from darlit.errors import DarlitError
from darlit.experiment import load_experiment
from darlit.probes import pictures
from probes.models import build, tokens


def images(folder) -> dict[str, list[int]]:
    """Steps by tag of all images in a run's TensorBoard log."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}


def test_every_second_validation_is_drawn_and_training_is_the_same_to_the_bit(tmp_path, data_folder):
    plain = write_cell(tmp_path / "plain", data_folder)
    drawn = write_cell(tmp_path / "drawn", data_folder, pictures__every_n_validations=2)
    assert fit(plain) == fit(drawn) == 0
    assert images(run_folder(plain)) == {}
    tags = ("pathway/cka", "pathway/depth_weights", "pathway/gates")
    assert images(run_folder(drawn)) == {tag: [10, 20] for tag in tags}
    for name, value in weights(run_folder(plain)).items():
        assert torch.equal(weights(run_folder(drawn))[name], value), name


def test_a_pathway_with_one_sum_has_a_cka_map_only(tmp_path, data_folder):
    cell = write_cell(tmp_path, data_folder, "residual", pictures__every_n_validations=4)
    assert fit(cell) == 0
    assert images(run_folder(cell)) == {"pathway/cka": [20]}


def test_a_hundred_validations_keep_no_graph_and_no_memory():
    model, ids = build("dar_full"), tokens(2)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def validate() -> None:
        with torch.no_grad():
            drawings = _drawings(model, ids)
        assert set(drawings) == {"cka", "depth_weights", "gates"}

    validate()
    before = tensors()
    for _ in range(100):
        validate()
    assert tensors() == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_drawing_leaves_no_figure_behind():
    from matplotlib.figure import Figure

    with torch.no_grad():
        drawings = _drawings(build("dar_full"), tokens(2))
    for draw in drawings.values():
        pixels = pictures.as_image(draw)
        assert pixels.shape[2] == 3
        assert pixels.std() > 10
    gc.collect()
    assert not any(issubclass(type(thing), Figure) for thing in gc.get_objects())


def test_off_by_default_and_on_in_the_small_cells():
    assert PathwayPictures().every_n_validations == 0
    for size in ("tiny", "small"):
        assert load_experiment(f"configs/size/{size}.yaml")["pictures"]["every_n_validations"] > 0
    with pytest.raises(DarlitError, match="every_n_validations=-1 is not allowed"):
        PathwayPictures(-1)

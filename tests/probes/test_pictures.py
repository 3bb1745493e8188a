"""The pictures: what is written on them, one scale for all models, and the same bytes every time."""

from __future__ import annotations

import re

import pytest
import torch

from darlit.probes import pictures
from darlit.probes.cka import cka_map
from darlit.probes.depth import DepthProfile, Gate, depth_profile
from darlit.probes.rescue import rescue_curve
from probes.models import build, tokens


@pytest.fixture(scope="module")
def drawings():
    """Every picture of three very different models, as darlit analyze makes them."""
    models, ids = {f"tiny_{arm}": build(arm) for arm in ("dar_full", "mhc4", "attnres_full")}, [tokens()]
    maps = {name: cka_map(model, ids) for name, model in models.items()}
    curves = {
        name: [rescue_curve(model, ids, kind) for kind in ("sequence", "zero")]
        for name, model in models.items()
        if "attnres" not in name
    }
    profiles = {name: depth_profile(model, ids) for name, model in models.items()}
    return {
        "cka": lambda: pictures.draw_cka(maps),
        "rescue": lambda: pictures.draw_rescue(curves),
        "depth_weights": lambda: pictures.draw_depth_weights(profiles),
        "gates": lambda: pictures.draw_gates(profiles),
    }


WRITTEN = {
    "cka": ["tiny_dar_full", "tiny_mhc4", "tiny_attnres_full", "depth of stream 0", "depth of stream 1", "linear CKA"],
    "rescue": [
        "tiny_dar_full",
        "tiny_mhc4",
        "rescue gain",
        "depth at which states are corrupted",
        "keep stream 3 (zero)",
    ],
    "depth_weights": [
        "tiny_dar_full",
        "tiny_attnres_full",
        "source (0 = embedding)",
        "entropy (nats)",
        "mean depth weight",
    ],
    "gates": ["tiny_dar_full: alpha", "tiny_dar_full: rho", "tiny_mhc4: res", "mean value", "component 1, attention"],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_names_labels_and_units_are_written(drawings, name, tmp_path):
    _, svg = pictures.save(drawings[name], tmp_path / "one")
    written = {re.sub(r"<[^>]+>", "", line).strip() for line in svg.read_text().splitlines()}
    assert set(WRITTEN[name]) <= written


def test_the_same_numbers_give_the_same_bytes(drawings, tmp_path):
    first, second = (pictures.save(drawings["rescue"], tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("name", ["cka", "depth_weights"])
def test_all_models_share_one_colour_scale(drawings, name):
    images = [image for axes in drawings[name]().axes for image in axes.images]
    assert len(images) >= 3
    assert {image.get_clim() for image in images} == {(0, 1)}


def test_all_models_share_one_gain_axis(drawings):
    assert len({axes.get_ylim() for axes in drawings["rescue"]().axes}) == 1


def test_places_without_a_weight_are_grey(drawings):
    image = next(axes.images[0] for axes in drawings["depth_weights"]().axes if axes.images)
    values = image.get_array()
    assert values.mask[0].tolist() == [False, *[True] * (values.shape[1] - 1)], "the first read sees the embedding"
    assert image.get_cmap().get_bad()[:3].tolist() == [0.9] * 3


def test_a_gate_of_feed_forward_branches_alone_is_drawn_by_numbers():
    """The exchange of DAR with blocks of one layer: nothing to draw for attention branches."""
    profile = DepthProfile(4, [], [Gate("rho", branch, ["0"], [0.9]) for branch in (1, 3)], tokens=1)
    (axes,) = pictures.draw_gates({"model": profile}).axes
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [0.9, 0.9]
    assert axes.get_ylim()[0] < 0.0 < 1.0 < axes.get_ylim()[1]


def test_an_image_is_pixels_of_the_whole_figure(drawings):
    pixels = pictures.as_image(drawings["rescue"], dpi=50)
    height, width, channels = pixels.shape
    assert channels == 3
    assert (height, width) == tuple(round(inches * 50) for inches in drawings["rescue"]().get_size_inches()[::-1])
    assert torch.from_numpy(pixels[0, 0].copy()).tolist() == [255, 255, 255]

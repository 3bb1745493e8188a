"""Saved models come back as they were trained; what cannot be rebuilt is refused in one line."""

from __future__ import annotations

import shutil

import pytest
import torch

from cells import weights
from darlit.data.manifest import open_manifest
from darlit.errors import DarlitError
from darlit.modules.loading import load


def rewritten(run, folder, change):
    """A copy of the run's last checkpoint after ``change(checkpoint)``."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    change(checkpoint)
    path = folder / "changed.ckpt"
    torch.save(checkpoint, path)
    return path


def test_a_run_folder_gives_its_last_weights_its_name_and_its_data(dar_run, data_folder):
    saved = load(dar_run)
    assert (saved.path, saved.name, saved.step) == (dar_run / "checkpoints" / "last.ckpt", "micro_dar_full", 5)
    assert not saved.module.training
    loaded = saved.module.state_dict()
    for name, value in weights(dar_run).items():
        assert torch.equal(loaded[name], value), name
    assert saved.manifest().folder == data_folder
    assert saved.tokenizer_description == open_manifest(data_folder).content["tokenizer"]
    assert saved.tokenizer().name == "bytes"


def test_a_checkpoint_file_is_taken_as_it_is(dar_run, tmp_path):
    assert load(dar_run / "checkpoints" / "best.ckpt").name == "micro_dar_full"
    alone = tmp_path / "alone.ckpt"
    shutil.copy(dar_run / "checkpoints" / "last.ckpt", alone)
    assert load(alone).name == "alone"
    assert load(alone).tokenizer().name == "bytes", "bytes need no data"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["darlit"].update(pathway="quadruple"), r"has pathway 'quadruple', this darlit has attnres, dar"),
        (lambda c: c["hyper_parameters"]["backbone"].update(novel=1), r"another darlit version.*novel"),
        (lambda c: c["state_dict"].pop("transformer.embedding.weight"), r"cannot be rebuilt.*embedding.weight"),
        (lambda c: c.pop("darlit"), r"is not a darlit checkpoint; give one that darlit fit wrote"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(dar_run, tmp_path, change, message):
    with pytest.raises(DarlitError, match=message) as refusal:
        load(rewritten(dar_run, tmp_path, change))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["a: [", "- just\n- a list\n", "\udcff"])
def test_a_damaged_config_is_refused(dar_run, tmp_path, content):
    run = tmp_path / "run"
    shutil.copytree(dar_run, run)
    (run / "config.yaml").write_text(content, errors="surrogateescape")
    with pytest.raises(DarlitError, match=r"config\.yaml") as refusal:
        load(run)
    assert "\n" not in str(refusal.value)

"""darlit export: one file that holds all, reloads to the same logits, and is refused when it is not whole."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from darlit.__main__ import main
from darlit.data.prepare import Options, prepare
from darlit.modules.loading import load
from trained import poison, train


@pytest.fixture(scope="module")
def exported(dar_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "deep" / "model.safetensors"
    assert main(["export", str(dar_run), "--out", str(path)]) == 0
    return path


def test_reloads_to_equal_logits_away_from_its_run(dar_run, exported):
    first, second = load(dar_run), load(exported)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(first.module(ids), second.module(ids))
    assert second.module.hparams == first.module.hparams
    assert (second.name, second.step) == (first.name, first.step) == ("micro_dar_full", 5)
    assert second.tokenizer().sha256 == first.tokenizer().sha256


def test_it_is_one_plain_safetensors_file(exported):
    with safe_open(exported, framework="pt") as file:
        saved = json.loads(file.metadata()["darlit"])
        names = set(file.keys())
    assert saved["pathway"] == "dar"
    assert saved["hyper_parameters"]["backbone"]["width"] == 32
    assert {"embedding.weight", "layers.0.attention.qkv.weight", "pathway.queries_JRD"} <= names
    assert [path.name for path in exported.parent.iterdir()] == ["model.safetensors"]


def test_every_verb_takes_it(exported, data_folder, tmp_path, capsys):
    assert main(["generate", str(exported), "--tokens", "3", "--temperature", "0"]) == 0
    arguments = ["--data", str(data_folder), "--tokens", "64", "--batch-size", "2", "--out", str(tmp_path)]
    assert main(["analyze", "cka", str(exported), *arguments]) == 0
    assert main(["export", str(exported), "--out", str(tmp_path / "again.safetensors")]) == 0
    assert load(tmp_path / "again.safetensors").name == "micro_dar_full"


def test_a_subword_tokenizer_travels_along(tmp_path, capsys):
    """The data folder may be gone; the exported file still turns text into ids and back."""
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(f"the {number} quick brown foxes jump" for number in range(2000)))
    data = tmp_path / "data"
    prepare([str(source)], data, Options(tokenizer="bpe", vocab_size=300, val_fraction=0.2, text_unit="paragraph"))
    run = train(tmp_path, data, "residual", model__init_args__backbone__vocab_size=320)
    path = tmp_path / "model.safetensors"
    assert main(["export", str(run), "--out", str(path)]) == 0
    shutil.rmtree(data)
    tokenizer = load(path).tokenizer()
    ids, _ = tokenizer.encode_batch([b"quick foxes"])
    assert tokenizer.decode(ids.tolist()) == b"quick foxes"
    capsys.readouterr()
    assert main(["generate", str(path), "--prompt", "the quick", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the quick")

    assert main(["generate", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "tokenizer" in error
    assert "is not to be found" in error
    assert "--tokenizer" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "model.pt"], ["model.pt", "must end in .safetensors"]),
        (["--out", "EXISTING"], ["exists", "--overwrite"]),
        (["--out", "new.safetensors", "--tokenizer", "nowhere.json"], ["nowhere.json", "does not exist"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(dar_run, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.safetensors").write_bytes(b"mine")
    options = [option.replace("EXISTING", "old.safetensors") for option in options]
    assert main(["export", str(dar_run), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
    assert [path.name for path in tmp_path.iterdir()] == ["old.safetensors"]
    assert (tmp_path / "old.safetensors").read_bytes() == b"mine"


class TestRefusedFiles:
    def error(self, capsys, path) -> str:
        assert main(["generate", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    def test_half_a_file(self, exported, tmp_path, capsys):
        half = tmp_path / "half.safetensors"
        half.write_bytes(exported.read_bytes()[:-100])
        assert "not a whole safetensors file" in self.error(capsys, half)

    def test_another_programs_file(self, tmp_path, capsys):
        save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
        assert "is not a model that darlit export wrote" in self.error(capsys, tmp_path / "other.safetensors")

    def test_no_file_and_no_run(self, tmp_path, capsys):
        assert "does not exist" in self.error(capsys, tmp_path / "nothing.ckpt")
        assert "is not a run folder" in self.error(capsys, tmp_path)

    def test_half_a_checkpoint(self, dar_run, tmp_path, capsys):
        half = tmp_path / "half.ckpt"
        half.write_bytes((dar_run / "checkpoints" / "last.ckpt").read_bytes()[:-1000])
        assert "is refused" in self.error(capsys, half)

    def test_a_checkpoint_without_a_tokenizer(self, dar_run, tmp_path, capsys):
        checkpoint = torch.load(dar_run / "checkpoints" / "last.ckpt", weights_only=True)
        checkpoint["darlit"].pop("tokenizer")
        torch.save(checkpoint, tmp_path / "alone.ckpt")
        assert "comes without a tokenizer; name it with --tokenizer" in self.error(capsys, tmp_path / "alone.ckpt")

    def test_weights_of_another_model(self, dar_run, tmp_path, capsys):
        checkpoint = torch.load(dar_run / "checkpoints" / "last.ckpt", weights_only=True)
        checkpoint["hyper_parameters"]["backbone"]["width"] = 64
        torch.save(checkpoint, tmp_path / "other.ckpt")
        assert "cannot be rebuilt" in self.error(capsys, tmp_path / "other.ckpt")

    def test_a_checkpoint_that_would_run_code(self, dar_run, tmp_path, capsys):
        run, sign = tmp_path / "run", tmp_path / "sign"
        shutil.copytree(dar_run, run)
        poison(run, sign)
        assert main(["export", str(run), "--out", str(tmp_path / "new.safetensors")]) == 2
        assert "is refused: not a checkpoint of plain tensors" in capsys.readouterr().err
        assert not sign.exists()
        assert not (tmp_path / "new.safetensors").exists()

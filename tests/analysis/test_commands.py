"""darlit analyze through the real command line, on really trained micro runs."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darlit.__main__ import main
from darlit.analysis.questions import Cka, Rescue
from darlit.analysis.report import redraw
from darlit.analysis.tokens import TokenRequest
from darlit.data.datamodule import TokenDataModule
from darlit.data.prepare import Options, prepare
from darlit.errors import DarlitError
from darlit.modules.loading import load
from darlit.probes.cka import CkaMap, cka_map
from darlit.probes.rescue import RescueCurve
from trained import poison

FEW = ["--tokens", "256", "--batch-size", "4", "--device", "cpu"]


def analyze(question: str, *arguments: object) -> int:
    return main(["analyze", question, *map(str, arguments), *FEW])


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.fixture(scope="module")
def everything(dar_run, residual_run, tmp_path_factory):
    """The output of ``all`` for a DAR model and a residual model side by side."""
    out = tmp_path_factory.mktemp("analysis") / "deep" / "out"
    assert analyze("all", dar_run, residual_run, "--out", out, "--corrupt", "sequence", "zero") == 0
    return out


def test_all_writes_numbers_pictures_and_tensorboard(everything):
    names = {path.name for path in everything.iterdir() if not path.name.startswith("events")}
    stems = {"cka": "cka", "rescue": "rescue", "depth": None, "depth_weights": None, "gates": None}
    wanted = {"cka.json", "rescue.json", "depth.json"}
    wanted |= {f"{stem}.{kind}" for stem in stems if stem != "depth" for kind in ("png", "svg")}
    assert names == wanted
    events = EventAccumulator(str(everything))
    events.Reload()
    assert set(events.Tags()["images"]) == {f"analysis/{stem}" for stem in stems if stem != "depth"}


def test_the_numbers_are_those_of_the_model_on_the_first_tokens_of_its_data(everything, dar_run, data_folder):
    content = json.loads((everything / "cka.json").read_text())
    assert content["analysis"] == "cka"
    dar, residual = content["models"]
    assert (dar["name"], residual["name"]) == ("micro_dar_full", "micro_residual")
    assert (dar["step"], dar["tokens"], dar["streams"], residual["streams"]) == (5, 256, [0, 1], [0, 0])
    assert dar["pathway"]["name"] == "dar"
    data = TokenDataModule(str(data_folder), sequence_length=32, batch_size=4, val_sequences=8)
    data.prepare_data()
    data.setup()
    assert dar["data"]["fingerprint"] == data.fingerprint
    assert dar["data"]["where"] == f"{data_folder.name}/val"
    batches = [tokens_BT[:, :-1] for tokens_BT in data.val_dataloader()]
    wanted = cka_map(load(dar_run).module.transformer, batches)
    torch.testing.assert_close(torch.tensor(dar["cka"]).double(), wanted.values_RR, rtol=0, atol=1e-6)


def test_rescue_and_depth_hold_what_the_docs_promise(everything):
    (rescue,) = json.loads((everything / "rescue.json").read_text())["models"]
    assert rescue["name"] == "micro_dar_full"
    assert [curve["corruption"] for curve in rescue["curves"]] == ["sequence", "zero"]
    curve = rescue["curves"][0]
    assert (curve["depths"], curve["tokens"], curve["span"]) == ([1, 2], 256, "at")
    for none, keep, gain in zip(curve["kl_none"], curve["kl_keep"][1], curve["gains"][1], strict=True):
        assert gain == pytest.approx(1 - keep / none)
    (depth,) = json.loads((everything / "depth.json").read_text())["models"]
    assert {(read["read"], read["target"]) for read in depth["reads"]} == {(r, j) for r in range(5) for j in range(2)}
    assert all(math.isclose(sum(read["weights"]), 1, abs_tol=1e-6) for read in depth["reads"])


def test_pictures_are_drawn_again_from_the_numbers_to_the_byte(everything, tmp_path, capsys):
    for numbers in everything.glob("*.json"):
        shutil.copy(numbers, tmp_path)
    found = redraw(tmp_path)
    assert [analysis.title for analysis in found] == ["CKA", "rescue gain", "depth weights"]
    pictures = [picture for analysis in found for picture in analysis.pictures]
    assert {picture.name for picture in pictures} == {"cka.png", "rescue.png", "depth_weights.png", "gates.png"}
    for picture in pictures:
        assert picture.read_bytes() == (everything / picture.name).read_bytes(), picture.name
    assert found[0].headlines[0].startswith("micro_dar_full: linear CKA of streams 0 and 1: equal depths 0.")


def test_numbers_that_are_not_defined_come_back_so():
    curve = RescueCurve("zero", "at", [1, 2], [0.0, 2.0], [[0.0, 1.0], [0.0, math.nan]], 8)
    (again,) = Rescue().restore({"curves": [{**vars(curve), "kl_keep": [[0.0, 1.0], [0.0, None]]}]})
    assert again.gains[0][1] == curve.gains[0][1] == 0.5
    assert math.isnan(again.gains[1][1])
    cka = CkaMap(torch.tensor([[1.0, math.nan], [0.5, 1.0]]), (0, 1), 8)
    record = Cka().record(cka)
    record["cka"][0][1] = None
    torch.testing.assert_close(Cka().restore(record).values_RR, cka.values_RR.double(), equal_nan=True)


def test_what_no_analysis_wrote_is_one_line(tmp_path):
    (tmp_path / "cka.json").write_text('{"models": [{"name": "tiny"}]}')
    with pytest.raises(DarlitError, match="cka.json' is no result of darlit analyze") as error:
        redraw(tmp_path)
    assert "\n" not in str(error.value)


def test_all_says_what_it_leaves_out(dar_run, residual_run, tmp_path, capsys):
    assert analyze("all", residual_run, "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "micro_residual: linear CKA" in out
    assert "micro_residual: no rescue gain: " in err
    assert "micro_residual: no depth weights: " in err
    assert not (tmp_path / "rescue.json").exists()


@pytest.mark.parametrize(("question", "reason"), [("rescue", "Standard residual has one"), ("depth", "has neither")])
def test_a_question_without_sense_is_refused_before_anything_is_written(
    question, reason, dar_run, residual_run, tmp_path, capsys
):
    assert analyze(question, dar_run, residual_run, "--out", tmp_path / "out") == 2
    error = one_line(capsys)
    assert "micro_residual: " in error
    assert reason in error
    assert not (tmp_path / "out").exists()


def test_a_text_of_the_users(dar_run, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("x = 1\n" * 100)
    assert analyze("depth", dar_run, "--text", text, "--out", tmp_path) == 0
    (model,) = json.loads((tmp_path / "depth.json").read_text())["models"]
    assert model["data"]["where"] == str(text)
    batches = TokenRequest(256, 4, None, text=text).batches(load(dar_run), torch.device("cpu"))
    assert [list(batch.shape) for batch in batches] == [[4, 32]] * 2
    assert bytes(batches[0][0].tolist()) == ("x = 1\n" * 100).encode()[:32]


def test_checkpoints_of_one_run_get_names_of_their_own(dar_run, tmp_path, capsys):
    checkpoints = dar_run / "checkpoints"
    assert analyze("cka", checkpoints / "last.ckpt", checkpoints / "best.ckpt", "--out", tmp_path) == 0
    first, second = (model["name"] for model in json.loads((tmp_path / "cka.json").read_text())["models"])
    assert first != second
    assert first.startswith("micro_dar_full ")
    capsys.readouterr()
    assert analyze("cka", dar_run, dar_run, "--out", tmp_path) == 2
    assert "given twice" in one_line(capsys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "100000000"], ["val has", "--tokens 100000000", "lower them"]),
        (["--tokens", "0"], ["--tokens 0", "from 1"]),
        (["--sequence-length", "33"], ["--sequence-length 33", "1 to 32"]),
        (["--batch-size", "1"], ["--batch-size 2 or more"]),
        (["--streams", "0", "2"], ["--streams 0 2", "has 2"]),
        (["--memory", "0"], ["--memory 0", "above 0"]),
        (["--device", "mps"], ["--device mps", "cpu"]),
        (["--text", "nowhere.txt"], ["nowhere.txt", "No such file"]),
        (["--data", "nowhere"], ["nowhere", "does not exist"]),
    ],
)
def test_bad_input_is_one_line(dar_run, tmp_path, capsys, options, words):
    question = "cka" if "--streams" in options else "all"
    assert main(["analyze", question, str(dar_run), *FEW, *options, "--out", str(tmp_path / "out")]) == 2
    error = one_line(capsys)
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


def test_data_of_another_vocabulary(dar_run, tmp_path, capsys):
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(f"the {number} quick brown foxes jump" for number in range(2000)))
    for vocab_size, reason in ((300, "backbone.vocab_size=257: another vocabulary"), (257, "was trained with 'bytes'")):
        data = tmp_path / f"data_{vocab_size}"
        options = Options(tokenizer="bpe", vocab_size=vocab_size, val_fraction=0.2, text_unit="paragraph")
        prepare([str(source)], data, options)
        capsys.readouterr()
        assert analyze("cka", dar_run, "--data", data, "--out", tmp_path / "out") == 2
        assert reason in one_line(capsys)


def test_a_checkpoint_away_from_its_run_asks_for_data(dar_run, data_folder, tmp_path, capsys):
    alone = tmp_path / "alone.ckpt"
    shutil.copy(dar_run / "checkpoints" / "last.ckpt", alone)
    assert analyze("cka", alone, "--out", tmp_path) == 2
    assert "does not say which data it was trained on" in one_line(capsys)
    assert analyze("cka", alone, "--data", data_folder, "--out", tmp_path) == 0


@pytest.mark.parametrize("question", ["cka", "rescue", "depth", "all"])
def test_a_checkpoint_that_would_run_code_is_refused(question, dar_run, tmp_path, capsys):
    run, sign = tmp_path / "run", tmp_path / "sign"
    shutil.copytree(dar_run, run)
    poison(run, sign)
    assert analyze(question, run, "--out", tmp_path / "out") == 2
    assert "is refused: not a checkpoint of plain tensors" in one_line(capsys)
    assert not sign.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["a flipped byte", "ids out of range"])
def test_data_given_by_hand_are_verified_as_fit_does(dar_run, data_folder, tmp_path, capsys, what):
    """Of the right size: only hashes, or a look at the ids, find it."""
    shutil.copytree(data_folder, tmp_path / "data")
    chunk = tmp_path / "data" / "val" / "chunk-0-0.bin"
    raw = bytearray(chunk.read_bytes())
    raw[12:200] = b"\xff" * 188 if what == "ids out of range" else bytes([raw[12] ^ 1]) + raw[13:200]
    chunk.write_bytes(raw)
    assert analyze("depth", dar_run, "--data", tmp_path / "data", "--out", tmp_path / "out") == 2
    assert f"{chunk}: damaged" in one_line(capsys)
    assert not (tmp_path / "out").exists()

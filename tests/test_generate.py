"""darlit generate: sampling, the cache over any length, text in whole characters, and refusals."""

from __future__ import annotations

import shutil

import pytest
import torch

from darlit.__main__ import main
from darlit.backbone import Transformer
from darlit.data.tokenizers import ByteTokenizer, train_bpe
from darlit.errors import DarlitError
from darlit.generation import Sampling, generate, texts
from darlit.modules.loading import load
from darlit.pathways.table import ARMS
from probes.models import CONFIG, build
from trained import poison

GREEDY = Sampling(temperature=0)


def take(number: int, stream) -> list[int]:
    return [next(stream) for _ in range(number)]


@pytest.mark.parametrize("arm", ARMS)
def test_greedy_decoding_equals_full_forwards(arm):
    model, ids = build(arm), [3, 1, 4]
    cached = take(CONFIG.sequence_length - 3, generate(model, ids, GREEDY, seed=0))
    with torch.no_grad():
        while len(ids) < CONFIG.sequence_length:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert cached == ids[3:]


def seen_by_the_model(monkeypatch) -> list[list[int]]:
    """The token ids of every forward pass from here on."""
    seen: list[list[int]] = []
    original = Transformer.forward

    def recorded(self, tokens_BT, *arguments, **options):
        seen.append(tokens_BT[0].tolist())
        return original(self, tokens_BT, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", recorded)
    return seen


def test_beyond_the_models_length_decoding_goes_on_from_the_newer_half(monkeypatch):
    model, length, half = build("dar_full", noise=0.0), CONFIG.sequence_length, CONFIG.sequence_length // 2
    seen = seen_by_the_model(monkeypatch)
    ids = [5, *take(2 * length, generate(model, [5], Sampling(temperature=2.0), seed=0))]
    assert [len(new) for new in seen] == [*[1] * length, half, *[1] * half, half, *[1] * (length - half - 2)]
    assert seen[length] == ids[length + 1 - half : length + 1]
    assert seen[length + 1] == [ids[length + 1]]


def test_every_token_costs_one_token(monkeypatch):
    seen = seen_by_the_model(monkeypatch)
    take(10, generate(build("dar_full"), [1, 2, 3, 4], GREEDY, seed=0))
    assert [len(new) for new in seen] == [4, *[1] * 9]


def test_a_seed_means_the_same_text_and_another_seed_another():
    model = build("dar_full", noise=0.0)
    draws = [take(12, generate(model, [1], Sampling(temperature=1.5), seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_ids_without_text_are_never_drawn():
    model = build("dar_full")
    with torch.no_grad():
        model.embedding.weight[40:] *= 20  # the most probable tokens by far
    drawn = take(40, generate(model, [1], Sampling(temperature=1.0), seed=0, vocab_size=40))
    assert max(drawn) < 40
    assert max(take(40, generate(model, [1], Sampling(temperature=1.0), seed=0))) >= 40


@pytest.mark.parametrize("prompt", [[], [1] * (CONFIG.sequence_length + 1)])
def test_a_prompt_of_a_wrong_length_is_refused(prompt):
    with pytest.raises(DarlitError, match=rf"prompt of {len(prompt)} tokens is not allowed; this model takes 1 to 16"):
        next(generate(build("residual"), prompt, GREEDY, seed=0))


class TestSampling:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])

    def test_temperature_scales_the_logits(self):
        torch.testing.assert_close(Sampling(2.0).probabilities(self.logits), (self.logits.double() / 2).softmax(-1))

    def test_zero_temperature_is_certain(self):
        assert GREEDY.probabilities(self.logits).tolist() == [0, 1, 0, 0]

    def test_top_k_keeps_the_k_most_probable(self):
        kept = Sampling(1.0, top_k=2).probabilities(self.logits)
        torch.testing.assert_close(kept[[1, 2]], torch.tensor([3.0, 2.0]).double().softmax(-1))
        assert kept[[0, 3]].tolist() == [0, 0]
        assert (Sampling(1.0, top_k=9).probabilities(self.logits) > 0).all()

    @pytest.mark.parametrize(
        ("top_p", "kept"), [(0.5, [1]), (0.64, [1]), (0.65, [1, 2]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
    )
    def test_top_p_keeps_the_fewest_that_make_up_p(self, top_p, kept):
        """Softmax of 3, 2, 1, 0 is 0.644, 0.237, 0.087, 0.032."""
        probabilities = Sampling(1.0, top_p=top_p).probabilities(self.logits)
        assert probabilities.nonzero().flatten().tolist() == kept
        assert probabilities.sum() == pytest.approx(1)

    def test_top_p_looks_at_what_top_k_left(self):
        kept = Sampling(1.0, top_k=2, top_p=0.7).probabilities(self.logits)
        assert kept.tolist() == [0, 1, 0, 0], "of two, the first has 0.73"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": -1.0}, r"temperature=-1\.0 is not allowed; temperature must be at least 0"),
            ({"top_k": -1}, r"top_k=-1 is not allowed"),
            ({"top_p": 0.0}, r"top_p must be above 0 and at most 1"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(DarlitError, match=message):
            Sampling(**options)


class TestTexts:
    @pytest.mark.parametrize("text", ["plain", "zwölf Öfen, 日本語 🙂!", "a\n\tb"])
    @pytest.mark.parametrize("kind", ["bytes", "bpe"])
    def test_pieces_are_whole_characters_and_make_up_the_text(self, text, kind):
        tokenizer = ByteTokenizer() if kind == "bytes" else train_bpe(["some text to learn from, some more"], 270)
        ids = tokenizer.encode_batch([text.encode()])[0].tolist()
        pieces = list(texts(tokenizer, ids))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)

    def test_each_piece_comes_as_soon_as_it_is_whole(self):
        asked = []

        def stream():
            for token in "aé".encode():
                asked.append(token)
                yield token

        pieces = texts(ByteTokenizer(), stream())
        assert next(pieces) == "a"
        assert len(asked) == 1

    def test_bytes_that_are_no_text_are_shown_as_such(self):
        assert "".join(texts(ByteTokenizer(), [0xFF, ord("a"), 0xC3])) == "\ufffda\ufffd"


class TestCommand:
    def test_streams_the_prompt_and_what_follows(self, dar_run, capsys):
        arguments = [str(dar_run), "--prompt", "def f", "--tokens", "40", "--device", "cpu", "--temperature", "0"]
        assert main(["generate", *arguments]) == 0
        out, err = capsys.readouterr()
        model = load(dar_run).module.transformer
        ids = [256, *b"def f"]
        wanted = bytes(token for token in take(40, generate(model, ids, GREEDY, 0, 257)) if token < 256)
        assert out == "def f" + wanted.decode("utf-8", "replace") + "\n"
        assert "40 tokens" in err

    def test_ends_with_the_document(self, dar_run, capsys, monkeypatch):
        monkeypatch.setattr("darlit.generation.generate", lambda *arguments: iter([*b"ab", 256, *b"cd"]))
        assert main(["generate", str(dar_run), "--tokens", "40"]) == 0
        out, err = capsys.readouterr()
        assert out == "ab\n"
        assert "2 tokens" in err
        assert "ended its text" in err

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--tokens", "0"], ["--tokens 0", "whole number from 1"]),
            (["--top-p", "2"], ["top_p=2.0", "at most 1"]),
            (["--prompt", "x" * 32], ["prompt of 33 tokens", "1 to 32"]),
            (["--device", "tpu9"], ["--device tpu9", "cpu"]),
            (["--tokenizer", "nowhere.json"], ["nowhere.json", "does not exist"]),
        ],
    )
    def test_bad_input_is_one_line(self, dar_run, capsys, options, words):
        assert main(["generate", str(dar_run), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(word in error for word in words), error

    def test_another_tokenizer_is_refused(self, dar_run, tmp_path, capsys):
        bpe = tmp_path / "tokenizer.json"
        bpe.write_text(train_bpe(["some text to learn from"], 257).definition)
        assert main(["generate", str(dar_run), "--tokenizer", str(bpe)]) == 2
        assert "was trained with 'bytes'" in capsys.readouterr().err

    def test_a_checkpoint_that_would_run_code_is_refused(self, dar_run, tmp_path, capsys):
        run, sign = tmp_path / "run", tmp_path / "sign"
        shutil.copytree(dar_run, run)
        poison(run, sign)
        assert main(["generate", str(run)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "is refused: not a checkpoint of plain tensors" in error
        assert not sign.exists()

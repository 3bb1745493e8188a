"""The verbs with few options: one line, the nearest name, numbers as in experiment files."""

from __future__ import annotations

import pytest

from darlit.__main__ import main
from darlit.arguments import Parser


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["grid", "statsu", "g.yaml"], "'statsu' is not allowed; did you mean status?"),
        (["grid", "run", "g.yaml", "--proceses", "2"], "no option --proceses; did you mean --processes?"),
        (["grid", "run", "g.yaml", "--proc", "2"], "no option --proc; did you mean --processes?"),
        (["grid", "run", "g.yaml", "--gpus", "two"], "argument --gpus: 'two' is not a whole number"),
        (["grid", "run"], "the following arguments are required: GRID"),
        (["plan", "x.yaml", "--utilisation", "nan"], "argument --utilisation: 'nan' is not a number"),
        (["plan", "x.yaml", "--precision", "bf16"], "--precision 'bf16' is not allowed; did you mean bf16-"),
        (["results", "--figure", "none"], "no option --figure; did you mean --figures?"),
        (["prepare", "x.txt", "--tokeniser", "bytes"], "no option --tokeniser; did you mean --tokenizer?"),
        (["prepare", "x.txt", "--out", "o", "--chunk-tokens", "1.5"], "'1.5' is not a whole number"),
        (["data", "inof", "x"], "'inof' is not allowed; did you mean info?"),
        (["bench", "--widht", "3"], "no option --widht; did you mean --width?"),
        (["generate", "x", "--top_k", "3"], "no option --top_k; did you mean --top-k?"),
        (["export", "x"], "the following arguments are required: --out"),
        (["analyze", "cak", "x"], "'cak' is not allowed; did you mean cka?"),
        (["pathways", "--layer", "3"], "no option --layer; did you mean --layers?"),
        (["fti"], "no verb 'fti'; did you mean fit?"),
        (["fit"], "fit needs a model; add --cell small_dar_full, or --config FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("text", "number"), [("1e6", 1_000_000), ("010", 10), ("2_000", 2000), ("-3", -3)])
def test_whole_numbers_are_written_as_in_experiments(text: str, number: int) -> None:
    parser = Parser()
    parser.add_argument("--count", type=int)
    assert parser.parse_args([f"--count={text}"]).count == number

"""``darlit analyze cka|rescue|depth|all CHECKPOINT_OR_RUN ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darlit.arguments import Parser
from darlit.errors import DarlitError

if TYPE_CHECKING:
    from rich.progress import Progress

    from darlit.analysis.questions import Question
    from darlit.analysis.tokens import TokenBatches
    from darlit.modules.loading import SavedModel
    from darlit.settings import class_of


def main(argv: list[str]) -> int:
    """Run the verb and return its exit status; bad input raises a one-line :class:`DarlitError`."""
    arguments = _parser().parse_args(argv)
    _check_numbers(arguments)
    from darlit.analysis import report
    from darlit.analysis.tokens import TokenRequest
    from darlit.device import choose_device
    from darlit.modules.loading import load

    if arguments.class_path:
        class_of(arguments.class_path)  # its pathway is known from here on
    device = choose_device(arguments.device)
    models = named([load(path) for path in arguments.models])
    for saved in models.values():
        saved.module.to(device)
    questions = _askable(_questions(arguments), models, skip=arguments.question == "all")
    request = TokenRequest(
        arguments.tokens,
        arguments.batch_size,
        arguments.sequence_length,
        arguments.data,
        arguments.text,
        arguments.tokenizer,
    )
    tokens = {name: request.batches(saved, device) for name, saved in models.items()}
    for question, asked in questions.items():
        answers = _answers(question, {name: models[name] for name in asked}, tokens)
        for name, answer in answers.items():
            print(f"{name}: {question.headline(answer)}")
        written = report.write(arguments.out, question, models, tokens, answers)
        print("written: " + ", ".join(map(str, written)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="darlit analyze",
        description="Look inside trained models: one JSON file and one side-by-side picture a question.",
    )
    parser.add_argument(
        "question",
        choices=("cka", "rescue", "depth", "all"),
        help="cka: how alike the streams are; rescue: what one clean stream restores; depth: depth weights and gates",
    )
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="CHECKPOINT_OR_RUN", help="of a run folder its last.ckpt is taken"
    )
    parser.add_argument("--out", type=Path, default=Path("analysis"), help="where to write (default: analysis)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, help="prepared folder, its validation split (default: each run's own)")
    source.add_argument("--text", type=Path, help="a text file instead")
    parser.add_argument("--tokenizer", help="for --text: bytes or a tokenizer.json (default: the model's)")
    parser.add_argument("--tokens", type=int, default=8192, help="at least so many tokens (default: 8192)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences at a time (default: 16)")
    parser.add_argument("--sequence-length", type=int, help="tokens of a sequence (default: the model's)")
    parser.add_argument("--class-path", help="my_module.MyLM of a model without its run folder (default: the run's)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--streams", type=int, nargs=2, metavar="J", help="cka: which two (default: 0 1)")
    parser.add_argument("--memory", type=float, default=4.0, metavar="GIB", help="cka: for its sums (default: 4)")
    parser.add_argument(
        "--corrupt",
        nargs="+",
        choices=("sequence", "mean", "zero"),
        default=["sequence"],
        help="rescue: what takes a state's place: another sequence's, the mean or zero (default: sequence)",
    )
    parser.add_argument(
        "--span",
        choices=("at", "up_to"),
        default="at",
        help="rescue: corrupt the states at a depth, or those at all depths up to it (default: at)",
    )
    return parser


def _check_numbers(arguments: argparse.Namespace) -> None:
    for option in ("tokens", "batch_size", "sequence_length"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise DarlitError(f"--{option.replace('_', '-')} {value} is not allowed; give a whole number from 1")
    if arguments.memory <= 0:
        raise DarlitError(f"--memory {arguments.memory:g} is not allowed; give GiB above 0")
    if arguments.streams is not None and min(arguments.streams) < 0:
        raise DarlitError(f"--streams {arguments.streams[0]} {arguments.streams[1]}: streams are numbered from 0")
    if arguments.question in ("rescue", "all") and "sequence" in arguments.corrupt and arguments.batch_size < 2:
        raise DarlitError("--corrupt sequence exchanges the sequences of a batch; give --batch-size 2 or more")


def _questions(arguments: argparse.Namespace) -> list[Question]:
    from darlit.analysis.questions import Cka, Depth, Rescue

    streams = None if arguments.streams is None else (arguments.streams[0], arguments.streams[1])
    questions: list[Question] = [
        Cka(streams, int(arguments.memory * 2**30)),
        Rescue(tuple(arguments.corrupt), arguments.span),
        Depth(),
    ]
    return [question for question in questions if arguments.question in (question.name, "all")]


def _askable(questions: Sequence[Question], models: Mapping[str, SavedModel], skip: bool) -> dict[Question, list[str]]:
    """By question, the models it makes sense of; refuses the others, or with ``skip`` says why it leaves them out.

    Raises:
        DarlitError: a model of which a question makes no sense.
    """
    askable: dict[Question, list[str]] = {}
    for question in questions:
        for name, saved in models.items():
            try:
                question.check(saved.module.transformer)
            except DarlitError as error:
                if not skip:
                    raise DarlitError(f"{name}: {error}") from error
                print(f"{name}: no {question.title}: {error}", file=sys.stderr)
            else:
                askable.setdefault(question, []).append(name)
    if not askable:
        raise DarlitError("no analysis makes sense of these models; the lines above say why")
    return askable


def _answers(
    question: Question, models: Mapping[str, SavedModel], tokens: Mapping[str, TokenBatches]
) -> dict[str, Any]:
    answers = {}
    with _progress() as progress:
        for name, saved in models.items():
            transformer, batches = saved.module.transformer, tokens[name]
            task = progress.add_task(f"{question.title}, {name}", total=len(batches) * question.passes(transformer))
            answers[name] = question.measure(transformer, batches, partial(progress.advance, task))
    return answers


def _progress() -> Progress:
    """A bar on a terminal, nothing elsewhere: the results follow a moment later."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def named(models: Sequence[SavedModel]) -> dict[str, SavedModel]:
    """Models by a name of their own: the cell, with the seed or the file where several share it."""

    def names(of_model: Callable[[SavedModel], str]) -> list[str]:
        return [of_model(saved) for saved in models]

    short = names(lambda saved: saved.name)
    seeded = names(lambda saved: f"{saved.name} seed {saved.run.get('seed_everything')}")
    full = names(lambda saved: f"{saved.name} {saved.path}")
    chosen = next((candidate for candidate in (short, seeded) if len(set(candidate)) == len(models)), full)
    if len(set(chosen)) != len(models):
        raise DarlitError("one checkpoint is given twice; give each once")
    return dict(zip(chosen, models, strict=True))

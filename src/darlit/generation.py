"""``darlit generate CHECKPOINT_OR_RUN --prompt TEXT``: text from a trained model, printed as it is made.

Every token costs one forward pass over one token: keys and values are cached, and the depth history of a pathway
belongs to a token and starts again with each.

Shapes: V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from darlit.arguments import Parser
from darlit.backbone import Transformer
from darlit.backbone.cache import KeyValueCache
from darlit.data.tokenizers import InvalidTextError, Tokenizer
from darlit.device import choose_device
from darlit.errors import DarlitError
from darlit.modules.loading import load
from darlit.pathways.contract import check_option
from darlit.settings import class_of

UNFINISHED = "\ufffd"
"""What the bytes of half a character decode to."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: only the k most probable tokens; 0 for all of them.
        top_p: only the fewest tokens whose probabilities add up to p (nucleus sampling, arXiv 1904.09751).
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_option("temperature", self.temperature, self.temperature >= 0, "at least 0")
        check_option("top_k", self.top_k, self.top_k >= 0, "at least 0")
        check_option("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """The distribution ``[V]`` in float64 that a token is drawn from."""
        logits_V = logits_V.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double()
        sorted_V, order_V = (logits_V / self.temperature).sort(descending=True, stable=True)
        probabilities_V = sorted_V.softmax(-1)
        if self.top_k:
            probabilities_V[self.top_k :] = 0
            probabilities_V /= probabilities_V.sum()
        before_V = probabilities_V.cumsum(-1) - probabilities_V
        # The most probable token always stays, so that rounding never leaves none.
        probabilities_V[1:][before_V[1:] >= self.top_p] = 0
        return torch.zeros_like(probabilities_V).scatter(0, order_V, probabilities_V / probabilities_V.sum())


@torch.no_grad()
def generate(
    transformer: Transformer, prompt: Sequence[int], sampling: Sampling, seed: int, vocab_size: int | None = None
) -> Iterator[int]:
    """Token ids that follow ``prompt``, one after the other without end.

    When the model's ``sequence_length`` is full, decoding goes on from the newer half of it: the cost of a token
    stays the same, and a model never sees more tokens than it was trained on.

    Args:
        transformer: in evaluation mode.
        prompt: token ids, at least one.
        sampling: how a token is drawn; on the CPU, so that a seed means the same on every device.
        seed: of all draws.
        vocab_size: ids from here on have no text and are never drawn.

    Raises:
        DarlitError: a prompt that is empty or longer than ``sequence_length``.
    """
    longest = transformer.config.sequence_length
    if not 1 <= len(prompt) <= longest:
        raise DarlitError(f"a prompt of {len(prompt)} tokens is not allowed; this model takes 1 to {longest}")
    device = transformer.head_weight.device
    generator = torch.Generator().manual_seed(seed)
    seen, new = list(prompt), list(prompt)
    cache = KeyValueCache(transformer.config, 1, transformer.head_weight)
    while True:
        if cache.length + len(new) > longest:
            new = seen[-max(1, longest // 2) :]
            cache = KeyValueCache(transformer.config, 1, transformer.head_weight)
        logits_V = transformer(torch.tensor([new], device=device), cache=cache)[0, -1, :vocab_size]
        probabilities_V = sampling.probabilities(logits_V.cpu())
        token = int(torch.multinomial(probabilities_V, 1, generator=generator))
        yield token
        seen, new = [*seen[-longest:], token], [token]


def texts(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of ``ids`` in pieces, each as soon as its last character is whole.

    A piece is what a token adds to the text of the tokens since the last piece, not the token's own text: some
    tokenizers write a token differently at the start of a text.
    """
    window: list[int] = []
    shown = ""
    for token in ids:
        window.append(token)
        text = tokenizer.decode(window).decode("utf-8", errors="replace")
        if len(text) > len(shown) and not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            window = [token]
            shown = tokenizer.decode(window).decode("utf-8", errors="replace")
    rest = tokenizer.decode(window).decode("utf-8", errors="replace")
    if len(rest) > len(shown):
        yield rest[len(shown) :]


def main(argv: list[str]) -> int:
    """Run the verb and return its exit status; bad input raises a one-line :class:`DarlitError`."""
    arguments = _parser().parse_args(argv)
    if arguments.tokens < 1:
        raise DarlitError(f"--tokens {arguments.tokens} is not allowed; give a whole number from 1")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    device = choose_device(arguments.device)
    if arguments.class_path:
        class_of(arguments.class_path)  # its pathway is known from here on
    saved = load(arguments.model)
    tokenizer = saved.tokenizer(arguments.tokenizer)
    transformer = saved.module.to(device).transformer
    # In training every document follows the separator of the one before it.
    prompt = [tokenizer.separator, *_encode(tokenizer, arguments.prompt)]
    stream = _until(generate(transformer, prompt, sampling, arguments.seed, tokenizer.vocab_size), tokenizer.separator)

    print(arguments.prompt, end="", flush=True)
    began, count = time.perf_counter(), 0

    def counted() -> Iterator[int]:
        nonlocal count
        for count, token in zip(range(1, arguments.tokens + 1), stream, strict=False):  # noqa: B007
            yield token

    for text in texts(tokenizer, counted()):
        print(text, end="", flush=True)
    print()
    seconds = time.perf_counter() - began
    ending = "" if count == arguments.tokens else ", then the model ended its text"
    print(f"{saved.name}: {count} tokens, {count / seconds:.0f} tokens/s{ending}", file=sys.stderr)
    return 0


def _until(ids: Iterator[int], end: int) -> Iterator[int]:
    for token in ids:
        if token == end:
            return
        yield token


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        ids, _ = tokenizer.encode_batch([text.encode("utf-8", errors="surrogateescape")])
    except InvalidTextError as error:
        raise DarlitError(f"--prompt is not UTF-8 (byte {error.offset}), which {tokenizer.name!r} needs") from error
    return [int(token) for token in ids]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="darlit generate", description="Text from a trained model.")
    parser.add_argument("model", type=Path, metavar="CHECKPOINT_OR_RUN", help="or a file that darlit export wrote")
    parser.add_argument("--prompt", default="", help="how the text begins (default: at the start of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="how many at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most probable (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k most probable (default: 0, all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the most probable that make up p (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--tokenizer", help="bytes or a tokenizer.json (default: the model's)")
    parser.add_argument("--class-path", help="my_module.MyLM of a model without its run folder (default: the run's)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    return parser

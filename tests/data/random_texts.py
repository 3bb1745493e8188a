"""Texts of many scripts, different for every seed."""

from __future__ import annotations

import random

WORDS = [
    "stream",
    "branch",
    "query",
    "gate",
    "layer",
    "token",
    "résumé",
    "Привет",
    "世界",
    "données",
    "🙂",
    "0",
    "42",
    "\t",
]


def random_text(seed: int, words: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) + ("\n" if generator.random() < 0.1 else "") for _ in range(words))

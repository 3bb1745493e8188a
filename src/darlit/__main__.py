"""The command line: ``darlit VERB ...``. Each verb's module is imported only when that verb runs."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

from darlit import __version__
from darlit.errors import DarlitError, nearest
from darlit.run.status import FAILED_ON_DISK, INTERRUPTED_BY_KEYBOARD

VERBS = {
    "fit": ("darlit.cli", "train one cell: fit --config experiments/tiny_dar_full.yaml"),
    "validate": ("darlit.cli", "loss of a checkpoint on data.val_sequences of the validation split, as fit logs it"),
    "test": ("darlit.cli", "loss of a checkpoint on the complete validation split (no other data is held out)"),
    "predict": ("darlit.cli", "loss of every token of the sequences that validate takes, as a file"),
    "prepare": ("darlit.data.prepare", "turn text into token chunks with a manifest"),
    "data": ("darlit.data.inspect", "look at a prepared folder, or verify every byte of it"),
    "results": ("darlit.grid.results", "one table from the run folders"),
    "pathways": ("darlit.pathways.table", "every residual pathway: state kept, cost, parameters, source"),
    "bench": ("darlit.bench", "what each pathway costs, side by side in one run"),
    "plan": ("darlit.grid.plan", "what an experiment or a grid will cost: parameters, memory, GPU-hours"),
    "grid": ("darlit.grid.commands", "check, plan, submit, run and follow a grid of cells"),
    "analyze": ("darlit.analysis.commands", "CKA of streams, rescue gain, depth weights: numbers and pictures"),
    "generate": ("darlit.generation", "text from a trained model"),
    "export": ("darlit.export", "one safetensors file with weights, configuration and tokenizer"),
}
"""Verb: the module whose ``main(arguments) -> exit status`` runs it, and its line in the help."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"darlit {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        print(f"darlit: error: no verb {verb!r}; {nearest(verb, VERBS)}", file=sys.stderr)
        return DarlitError.exit_status
    _replace_unprintable()
    try:
        module = importlib.import_module(VERBS[verb][0])
        return module.main([verb, *rest] if module.__name__ == "darlit.cli" else rest)
    except DarlitError as error:
        print(f"darlit: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # fit catches it once it trains, to save
        print(f"darlit: {verb} was interrupted", file=sys.stderr)
        return INTERRUPTED_BY_KEYBOARD
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise  # not of a file: its traceback is needed
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        print(f"darlit: error: {where}{error.strerror}{'; make room there' if full else ''}", file=sys.stderr)
        return FAILED_ON_DISK


def _replace_unprintable() -> None:
    """Print a replacement for every character that the terminal's encoding lacks, instead of ending with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def console() -> NoReturn:
    """What the command ``darlit`` runs."""
    sys.path.append(str(Path.cwd()))  # a class of your own, such as my_ideas.ScaledLM, is found where you type
    status = main()
    gc.freeze()  # or the collector walks through all of PyTorch once more on the way out, which takes over a second
    sys.exit(status)


def _help() -> str:
    lines = [f"  {verb:<10}{line}" for verb, (_, line) in VERBS.items()]
    return "\n".join(["usage: darlit VERB [options]     (darlit VERB --help for its options)", "", *lines])


if __name__ == "__main__":
    console()

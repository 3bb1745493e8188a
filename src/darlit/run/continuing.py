"""Continuing a run: as what it was trained as, or as another one that says so."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from darlit.errors import DarlitError
from darlit.run.identity import CONTINUED, Recorded, difference, digest


def check_continued(recorded: Recorded | None, identity: Mapping[str, Any], where: str) -> None:
    """Raise DarlitError where a run would be continued as something else than it was trained as.

    The learning rate would bend midway, or the summary would claim for the complete run what held for its end. Whoever
    wants to train on from its weights under another plan gives the checkpoint by its path to a new cell.

    Args:
        recorded: what was trained; None: not known.
        identity: what is asked for.
        where: the folder or checkpoint, for the error.
    """
    if recorded is None:
        raise DarlitError(
            f"{where} does not say what it was trained as; start over with --overwrite true, or give the path of its "
            "checkpoint to another --cell"
        )
    there = {field: value for field, value in recorded.identity.items() if field != CONTINUED}
    if changed := Recorded(there, recorded.devices, recorded.partial).change(identity):
        raise DarlitError(
            f"{where} was trained with {changed}; a run keeps what it was trained as: set it back, choose another "
            "--cell, or start over with --overwrite true"
        )


def continued_identity(
    checkpoint: Mapping[str, Any], identity: dict[str, Any], where: str, in_place: bool
) -> dict[str, Any]:
    """Return the identity of the run that goes on from a checkpoint; warns where it is another run.

    Args:
        checkpoint: the plain values of the checkpoint.
        identity: what is asked for.
        where: the checkpoint, for errors.
        in_place: whether the checkpoint lies in the folder of the run itself.

    Raises:
        DarlitError: in place, and trained as something else.
    """
    there = checkpoint.get("identity")
    if in_place:
        check_continued(Recorded(there, 0) if there else None, identity, where)
    earlier = dict(there or {})
    continued = earlier.pop(CONTINUED, None)
    if changed := difference(earlier, identity):
        warnings.warn(f"{where} was trained with {changed}: the new run does not compare with others", stacklevel=2)
        continued = f"step {checkpoint['global_step']} of {digest(earlier)}"
    return identity if continued is None else {**identity, CONTINUED: continued}

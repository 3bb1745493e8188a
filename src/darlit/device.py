"""Which device a verb runs on."""

from __future__ import annotations

import torch

from darlit.errors import DarlitError


def choose_device(name: str) -> torch.device:
    """``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:<n>``: devices that have float64.

    Raises:
        DarlitError: another device, or a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DarlitError(f"--device {name} is not known; give auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise DarlitError(f"--device {name} is not allowed; give auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DarlitError(
            f"--device {name} is not there: this machine shows {torch.cuda.device_count()} GPUs; give cpu"
        )
    return device

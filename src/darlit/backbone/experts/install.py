"""``python -m darlit.backbone.experts.install``: megablocks beside a current PyTorch, without a compiler.

megablocks pins an old PyTorch, and its build asks PyTorch for a CUDA compiler. So its wheels are built here against a
PyTorch that says there is none, and installed without their pins; what was compiled in them is in
`compiled_parts`. `pip check` will name the pins that are not met.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = ("megablocks==0.10.0", "stanford-stk==0.7.1")
BUILD_TOOLS = ("setuptools<79", "wheel", "packaging")
TORCH_WITHOUT_COMPILER = {
    "torch/__init__.py": "__version__ = '2.9.0'\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = BuildExtension = CUDAExtension = None\n",
}


def main() -> int:
    """Build and install both wheels into the environment of this Python; returns pip's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        tools, stand_in, wheels = (Path(folder) / name for name in ("tools", "torch", "wheels"))
        for name, content in TORCH_WITHOUT_COMPILER.items():
            (stand_in / name).parent.mkdir(parents=True, exist_ok=True)
            (stand_in / name).write_text(content)
        build = {"PYTHONPATH": f"{stand_in}{os.pathsep}{tools}"}
        return (
            _pip("install", "--target", str(tools), *BUILD_TOOLS)
            or _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), *REQUIREMENTS, **build)
            or _pip("install", "--no-deps", "--no-index", "--find-links", str(wheels), *REQUIREMENTS)
        )


def _pip(*arguments: str, **environment: str) -> int:
    command = [sys.executable, "-m", "pip", "--quiet", "--no-cache-dir", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    sys.exit(main())

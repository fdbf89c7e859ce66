"""Entry point of the command ``flux``: makes sure that ``import flux`` finds this project before it does so.

On PyPI, `flux` is a different project. It installs into the same folder, so it can replace or remove parts of
this one. Standard library only, and no import of flux before the check.
"""

from __future__ import annotations

import sys
from importlib import metadata, util
from pathlib import Path

_OURS = "flux: fused communication and computation kernels for PyTorch."
_REINSTALL = "pip install --force-reinstall --no-deps flux-kernels"

# `flux --help` answers from here, as importing torch takes seconds.
COMMANDS = {
    "bench": "Time flux against the strongest alternatives here.",
    "compare": "Compare two results of bench.",
    "history": "Follow each row over results of bench, by their dates.",
    "tune": "Time every way to run each operator here, and write what plans choose by.",
    "verify": "Compare every op with exact results",
    "doctor": "Look at this machine: versions, native library, GPUs, links, memory, environment.",
}


def other_project() -> str | None:
    """Advice if a distribution called `flux` is installed, None otherwise.

    That is PyPI's other project, or this one before 0.2. Uninstalling it later removes files of this one.
    """
    try:
        version = metadata.version("flux")
    except metadata.PackageNotFoundError:
        return None
    place = "installed into the folder of flux-kernels"
    return f"`flux` {version} is {place}: pip uninstall flux, then {_REINSTALL}"


def shadowed() -> str | None:
    """Why ``import flux`` does not find this project, and what to do; None if it does."""
    spec = util.find_spec("flux")
    if spec is not None and spec.origin is not None:
        if _OURS in Path(spec.origin).read_text(errors="replace"):
            return None
        found = f"`import flux` finds {spec.origin}, which is not part of flux-kernels"
    else:
        found = "the package of flux-kernels has lost its __init__.py"
    return f"{found}: {other_project() or f'rename what is in the way, or {_REINSTALL}'}"


def main() -> None:
    """The command ``flux``."""
    if reason := shadowed():
        raise SystemExit(f"flux: {reason}")
    if sys.argv[1:] in (["--help"], ["-h"]):
        lines = "\n".join(f"  {name:10}{what}" for name, what in COMMANDS.items())
        print(f"Usage: flux COMMAND ...\n\n{_OURS}\n\n{lines}\n\n`flux COMMAND --help` says more of one.")
        return
    from flux.cli import main as command

    command()


if __name__ == "__main__":
    sys.argv[0] = "flux"
    main()

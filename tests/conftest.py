"""Offline, deterministic, one thread, fresh memory poisoned with NaN, and every shape checked."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

_hook = install_import_hook("headattr", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-proven",
        action="store_true",
        help="write the worst errors of the identity tests to headattr/model/proven.json",
    )

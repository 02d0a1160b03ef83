"""Stores that earlier versions wrote give the answers that they gave then."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headattr import query
from headattr.edges import Edge
from headattr.store.check import check_store
from headattr.store.published import read_manifest
from headattr.store.reader import open_store

DATA = Path(__file__).parent / "data"
STORES = sorted(DATA.glob("store-*/*.zip"))


def assert_answers(found: Any, wanted: Any, where: str) -> None:
    """All that was answered is there still, and what is a number is that number; more may have
    come to it."""
    if isinstance(wanted, dict):
        assert found.keys() >= wanted.keys(), where
        for key in wanted:
            assert_answers(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_answers(one, other, f"{where}[{i}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12), where
    else:
        assert found == wanted, where


def unpacked(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / path.stem)
    return folder / path.stem


def test_format_1_0_is_archived(tmp_path: Path) -> None:
    assert {path.stem for path in STORES if path.parent.name == "store-1.0"} == {
        *("capped", "heard", "every", "decoder"),
    }
    kinds, outputs = set[str](), set[str]()
    for path in STORES:
        manifest = read_manifest(unpacked(path, tmp_path))
        assert manifest["version"] == path.parent.name.removeprefix("store-")
        for plan in manifest["layers"]:
            kinds.add(manifest["sources"][plan["basis"]]["kind"])
            if plan["output"] is not None:
                outputs.add(manifest["sources"][plan["output"]]["kind"])
    assert kinds >= {"tokens", "sae", "crosscoder", "transcoders", "plain"}
    assert outputs >= {"sae", "transcoder", "attention", "unembed"}
    size = sum(p.stat().st_size for p in (DATA / "store-1.0").rglob("*") if p.is_file())
    assert size < 500_000


@pytest.mark.parametrize("path", STORES, ids=[f"{p.parent.name} {p.stem}" for p in STORES])
def test_an_archived_store_is_whole_and_gives_the_answers_it_gave(
    path: Path, tmp_path: Path
) -> None:
    kept = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with open_store(unpacked(path, tmp_path)) as store:
        assert check_store(store)["problems"] == []
        for wanted in kept:
            edge = Edge(wanted["layer"], wanted["head"], wanted["q_pos"], wanted["k_pos"])
            found = query.edge(store, wanted["prompt"], edge)
            assert_answers(found, wanted, f"prompt {wanted['prompt']} {edge}")
    assert len(kept) >= 2

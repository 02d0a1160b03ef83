"""Keep small stores of the format as it is now, with the answers that they give: every later
version must read them, and give these answers (tests/test_archived.py).

    python scripts/archive_store.py tests/data/store-1.0

Made once for each version of the format, and never again.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import made
import tiny
import torch

import headattr
from headattr import query
from headattr.basis.dictionary import Release
from headattr.edges import Edge
from headattr.model.sites import Site
from headattr.store.reader import Store

TEXTS = tiny.prompts(7, 5)


def plain() -> headattr.PlainDictionary:
    """Given directions, activations and bias."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(12, 24, generator=generator)
    acts = [torch.relu(torch.randn(len(t), 12, generator=generator)) for t in TEXTS]
    return headattr.PlainDictionary(directions, acts, directions[3] / 2)


def attention() -> Release:
    """A dictionary of what attention adds to the stream."""
    site = [Site("attn_out", 2)]
    return Release("sae", "attention", None, (made.dictionary(site, site, 3),))


def runs() -> dict[str, tuple[Any, dict[int, Any], dict[str, Any]]]:
    """Model, bases and options: every kind of basis, of output and of reading, windows and caps,
    both compressions, several shards, a prompt that is set aside."""
    return {
        "capped": (
            tiny.gemma2(),
            {0: "tokens", 1: tiny.sae(layer=1), 2: made.transcoders(0, 1)},
            {"output": "unembed", "heads": "L0H1,L1H0,L2H2", "edges": "top:3"},
        ),
        "heard": (
            tiny.llama(),
            {1: made.crosscoder(1, 2), 2: tiny.sae(layer=2)},
            {"output": {1: made.transcoders(1), 2: attention()}, "heads": "L1H0,L2H1"},
        ),
        "every": (
            tiny.gpt2(),
            {1: plain(), 2: tiny.sae(layer=2)},
            {"outputs": "all", "heads": "L1H1,L2H0", "portable": True, "prompts_per_shard": 1},
        ),
        "decoder": (
            tiny.neox(),
            {1: tiny.sae(layer=1)},
            {"output": {2: tiny.sae(layer=2)}, "read": "decoder", "heads": "L1H1", "edges": "all"},
        ),
    }


def answers(store: Store) -> list[dict[str, Any]]:
    """Of the last edge of each head in each prompt."""
    found = []
    for prompt in store:
        for head in store.heads:
            kept = store.edges(prompt, head)
            at = int(kept["q_pos"][-1]), int(kept["k_pos"][-1])
            found.append(query.edge(store, prompt, Edge(head.layer, head.head, *at)))
    return found


def main(place: Path) -> None:
    if place.exists():
        sys.exit(f"{place} is there: what is archived is never made again")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    place.mkdir(parents=True)
    for name, (model, basis, options) in runs().items():
        given = {"topk": 4, "progress": False, **options}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / name
            with headattr.attribute(model, basis, [*TEXTS, []], out, **given) as store:
                kept = answers(store)
            shutil.make_archive(str(place / name), "zip", out)
        text = json.dumps(kept, ensure_ascii=False, allow_nan=False)
        (place / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, len(kept), "answers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The demo: the embedded model explained over the embedded texts."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headattr import query
from headattr.config import RunConfig
from headattr.edges import Edge, HeadId
from headattr.inputs import inputs_of
from headattr.model.embedded import embedded_folder
from headattr.pipeline import execute
from headattr.plan import make_run
from headattr.store.check import check_store
from headattr.store.reader import Store
from headattr.viewers.plots import draw_edge
from headattr.viewers.text import render_edge

PICTURE = "attribution.png"


class _Seen(NamedTuple):
    """What the kept edges of one head show, over all prompts."""

    head: HeadId
    previous: float
    """Mean pattern on the token before."""
    induction: float
    """Mean pattern on tokens that follow an earlier copy of the query's token, where there is
    one."""
    best: tuple[float, int, Edge] | None
    """The strongest induction edge, or else the strongest: pattern, prompt, edge."""


def run_demo(out: Path) -> dict[str, Any]:
    """Run (or reuse) the demo store in `out` and draw its clearest edge.

    {"store", "picture", "heads": [{"head", "previous_token", "induction", "feature_share"}],
    "edges": three edge answers, "check": the answer of `check`}.
    """
    config = RunConfig(
        model="demo",
        basis=("demo",),
        output=("demo",),
        out=str(out),
        texts=str(embedded_folder() / "demo" / "texts.txt"),
        topk=32,
    )
    with execute(make_run(config, inputs_of(config))) as store:
        seen = [_look(store, head) for head in store.heads]
        shares = query.head_shares(store)
        worth = _worth_a_look(seen)
        chosen = [found.best for found in worth if found.best is not None][:3]
        answers = [query.edge(store, prompt, edge) for _, prompt, edge in chosen]
        _, prompt, edge = chosen[0]
        row = store.edges(prompt, HeadId(edge.layer, edge.head))
        keys = row["q_pos"] == edge.q_pos
        weights = dict(zip(row["k_pos"][keys].tolist(), row["pattern"][keys].tolist(), strict=True))
        draw_edge(out / PICTURE, answers[0], store.token_texts(prompt), weights)
        return {
            "store": str(store.path),
            "picture": str(out / PICTURE),
            "heads": [
                {
                    "head": str(found.head),
                    "previous_token": found.previous,
                    "induction": found.induction,
                    "feature_share": shares[found.head]["feature_share"],
                }
                for found in worth
            ],
            "edges": answers,
            "check": check_store(store),
        }


def _look(store: Store, head: HeadId) -> _Seen:
    """Sum the pattern of the kept edges by what they link."""
    previous: list[float] = []
    induction: list[float] = []
    best: tuple[float, int, Edge] | None = None
    for prompt in store:
        tokens = np.array(store.tokens(prompt))
        edges = store.edges(prompt, head)
        q_pos, k_pos, pattern = edges["q_pos"], edges["k_pos"], edges["pattern"]
        previous.append(float(pattern[k_pos == q_pos - 1].sum()) / max(1, len(tokens) - 1))
        after_copy = (
            (k_pos >= 1) & (k_pos < q_pos) & (tokens[np.maximum(k_pos, 1) - 1] == tokens[q_pos])
        )
        repeated = sum(token in tokens[1:i] for i, token in enumerate(tokens) if i > 1)
        induction.append(float(pattern[after_copy].sum()) / max(1, repeated))
        links = after_copy if after_copy.any() else np.ones_like(after_copy)
        at = int(np.argmax(np.where(links, pattern, -1.0)))
        if len(pattern) and (best is None or pattern[at] > best[0]):
            best = (
                float(pattern[at]),
                prompt,
                Edge(head.layer, head.head, int(q_pos[at]), int(k_pos[at])),
            )
    return _Seen(head, float(np.mean(previous)), float(np.mean(induction)), best)


def _worth_a_look(seen: list[_Seen]) -> list[_Seen]:
    """The clearest induction head, the clearest previous-token head, then the others by either
    score."""
    first = max(seen, key=lambda found: found.induction)
    second = max(seen, key=lambda found: found.previous)
    rest = sorted(seen, key=lambda found: -max(found.induction, found.previous))
    order = [first, second, *rest]
    return list({found.head: found for found in order}.values())[:6]


def render_demo(answer: dict[str, Any]) -> str:
    """The findings as text for a terminal."""
    lines = [
        "Heads worth a look: the weight they give to the token before, to what followed an earlier",
        "copy of the token (induction), and the share of their scores, over all edges, that",
        "feature pairs explain (1 is all; the rest is bias and error):",
    ]
    lines += [
        f"  {row['head']}  token before {row['previous_token']:.2f}   induction "
        f"{row['induction']:.2f}   explained {row['feature_share']:.2f}"
        for row in answer["heads"]
    ]
    lines += [
        "",
        "Three edges, and the features behind them (a label quotes contexts, [x] is where it",
        "fires; the model also learned from random strings):",
    ]
    lines += [render_edge(edge, pairs=4, features=2) for edge in answer["edges"]]
    checked = answer["check"]
    lines += [
        "",
        f"{checked['edges']:,} edges in {answer['store']}; every table adds up to the model's "
        "own numbers: worst "
        f"completeness {checked['completeness']['worst']:.1e} (QK), "
        f"{checked['ov']['completeness']['worst']:.1e} (OV)",
        f"Picture: {answer['picture']}",
    ]
    return "\n".join(lines)

"""Which site a hook name means; anything else is refused by name."""

import re

from headattr.errors import DictionaryError
from headattr.model.sites import Site, SiteKind

_HF = r"(?:model\.)?(?:language_model\.)?(?:transformer\.|gpt_neox\.)?(?:layers|h|blocks)\.(\d+)"
_BLOCK_INPUT = re.compile(
    rf"^(?:blocks\.(\d+)\.hook_resid_pre|hidden_states\[(\d+)\]|hidden_states\.(\d+)|{_HF}\.input)$"
)
_BLOCK_OUTPUT = re.compile(rf"^(?:blocks\.(\d+)\.hook_resid_post|{_HF}(?:\.output)?)$")
_INSIDE: dict[str, SiteKind] = {
    "hook_resid_mid": "resid_mid",
    "hook_attn_out": "attn_out",
    "attn.hook_z": "z",
    "hook_mlp_out": "mlp_out",
    "mlp.hook_out": "mlp_own",
    "mlp.hook_in": "mlp_in",
    "hook_mlp_in": "resid_mid",  # a copy of the stream, before the norm
    "ln2.hook_normalized": "mlp_normed",
    "self_attn.o_proj.input": "z",
    "mlp.input": "mlp_in",
    "mlp.output": "mlp_own",
    "self_attn.output": "attn_own",
    "pre_feedforward_layernorm.output": "mlp_in",
    "post_feedforward_layernorm.output": "mlp_out",
}
_IN_BLOCK = re.compile(rf"^(?:blocks\.(\d+)|{_HF})\.(.+)$")
_KNOWN = (
    "the residual stream between blocks (blocks.N.hook_resid_pre, blocks.N.hook_resid_post, "
    "layers.N, hidden_states[N]), attention's output (blocks.N.hook_attn_out, "
    "blocks.N.attn.hook_z), what an MLP reads (blocks.N.mlp.hook_in, blocks.N.ln2.hook_normalized, "
    "blocks.N.hook_resid_mid) or writes (blocks.N.hook_mlp_out)"
)


def site_of(hook_name: str, where: str = "the dictionary") -> Site:
    """The site of a hook's name, as TransformerLens, sparsify or Hugging Face write it; the output
    of block N is resid_pre of N + 1. `where` says whose it is.

    Raises DictionaryError for every other name.
    """
    if match := _BLOCK_INPUT.match(hook_name):
        return Site("resid_pre", int(next(group for group in match.groups() if group)))
    if match := _BLOCK_OUTPUT.match(hook_name):
        return Site("resid_pre", int(next(group for group in match.groups() if group)) + 1)
    match = _IN_BLOCK.match(hook_name)
    if match and match.group(3) in _INSIDE:
        return Site(_INSIDE[match.group(3)], int(match.group(1) or match.group(2)))
    raise DictionaryError(f"{where}'s site is {hook_name!r}; expected {_KNOWN}")


_NAMES: dict[SiteKind, str] = {
    "resid_pre": "hook_resid_pre",
    "z": "attn.hook_z",
    "attn_own": "self_attn.output",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_normed": "ln2.hook_normalized",
    "mlp_in": "mlp.hook_in",
    "mlp_own": "mlp.hook_out",
    "mlp_out": "hook_mlp_out",
}


def hook_name_of(site: Site, n_layers: int) -> str:
    """The TransformerLens name of a site; the stream behind the last layer is its resid_post."""
    if site.kind == "resid_pre" and site.layer == n_layers:
        return f"blocks.{n_layers - 1}.hook_resid_post"
    return f"blocks.{site.layer}.{_NAMES[site.kind]}"

"""Which layer's resid_pre a hook name means; anything else is refused by name."""

import re

from headattr.errors import DictionaryError

_BLOCK_INPUT = re.compile(
    r"^(?:blocks\.(\d+)\.hook_resid_pre|hidden_states\[(\d+)\]|hidden_states\.(\d+)|"
    r"(?:model\.|transformer\.|gpt_neox\.)?(?:layers|h)\.(\d+)\.input)$"
)
_BLOCK_OUTPUT = re.compile(
    r"^(?:blocks\.(\d+)\.hook_resid_post|"
    r"(?:model\.|transformer\.|gpt_neox\.)?(?:layers|h|blocks)\.(\d+)(?:\.output)?)$"
)


def resid_pre_layer(hook_name: str) -> int:
    """The layer whose resid_pre the site is: the output of block N is resid_pre of N + 1.

    Raises DictionaryError for every other site (attention or MLP outputs, resid_mid, hook_z, ...).
    """
    if match := _BLOCK_INPUT.match(hook_name):
        return int(next(group for group in match.groups() if group))
    if match := _BLOCK_OUTPUT.match(hook_name):
        return int(next(group for group in match.groups() if group)) + 1
    raise DictionaryError(
        f"the dictionary's site is {hook_name!r}; expected the residual stream between blocks: "
        "blocks.N.hook_resid_pre, blocks.N.hook_resid_post, layers.N (a block's output) or "
        "hidden_states[N]"
    )


def check_site(hook_name: str, layer: int, where: str) -> None:
    """Refuse a dictionary of another layer than the one it is asked for."""
    found = resid_pre_layer(hook_name)
    if found != layer:
        raise DictionaryError(
            f"{where} was trained on {hook_name!r}, which is resid_pre of layer {found}; it "
            "was given for "
            f"layer {layer}: use {found}={where}"
        )

"""Places in a model where a dictionary may read or write, in the order of the stream.

resid_pre L     the residual stream before layer L (resid_post of L - 1); n_layers: the last
z L             the heads' outputs before W_O, side by side [head * d_head]
attn_out L      what attention adds to the stream (behind the norm after attention, if any)
resid_mid L     the stream between attention and MLP; none where both read the same stream
mlp_normed L    the stream that the MLP reads, divided by its norm's scale, before gain and bias
mlp_in L        what the MLP module is given: behind its norm
mlp_out L       what the MLP adds to the stream (behind the norm after the MLP, if any)
"""

from typing import Literal, NamedTuple

SiteKind = Literal["resid_pre", "z", "attn_out", "resid_mid", "mlp_normed", "mlp_in", "mlp_out"]


class Site(NamedTuple):
    """A place in the model."""

    kind: SiteKind
    layer: int

    def __str__(self) -> str:
        """`resid_pre 5`."""
        return f"{self.kind} {self.layer}"


MLP_READS = ("resid_mid", "mlp_normed", "mlp_in")
"""Kinds of site from which a transcoder of an MLP reads."""

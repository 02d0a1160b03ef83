"""The components of one side of a head - query, key or value - projected into head space.

    features[i, slot] = coef_if R_i W_Q N(d_f) / sigma_i            (with QK-norm: g / rms(q_i) too)
    kinds[i] = (sum over features, bias, error, ...)

Everything a table needs follows from these two by dot products. The bias kind holds the constants
as well (norm bias, b_Q / b_K / b_V), so the kinds sum to the whole query, key or value vector.
Everything is computed in float64; the pairs alone are products of float32 copies.

`Kinds` are sums alone. A `Side` holds what grows with the prompt: one row a feature that is active
somewhere, and kinds. The features of a position, `Projected`, are made where they are asked for.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.attribution.prepared import Prepared
from headattr.basis.component import Components
from headattr.kernels.feature_rows.dispatch import feature_rows
from headattr.kernels.row_means.batched import Keys
from headattr.model.head import HeadWeights, Norm, Rotary
from headattr.model.head import Side as SideName


@dataclass(frozen=True)
class Projected:
    """One side of one head at some positions."""

    exact: Float[Tensor, "pos slot d_head"]
    """The features, float64; zero rows behind each position's last."""
    counts: Int[Tensor, "pos"]
    columns: Int[Tensor, "pos slot"]
    """Of the features; 0 behind each position's last."""
    kinds: Float[Tensor, "pos kind d_head"]
    """float64."""
    parts: Float[Tensor, "pos part d_head"]
    """float64; members of the kinds that have several."""
    constant: Float[Tensor, "pos d_head"]
    """The part of the bias that no change of the stream scales: norm bias and b_Q (b_K, b_V)."""
    regrow: Float[Tensor, "pos slot"]
    head_regrow: Float[Tensor, "pos slot"] | None
    """With QK-norm rms(q_i) / rms of the query without that feature, else None."""
    dtype: torch.dtype

    @cached_property
    def features(self) -> Float[Tensor, "pos slot d_head"]:
        """The features in the type of the pairs."""
        return self.exact.to(self.dtype)

    @cached_property
    def whole(self) -> Float[Tensor, "pos d_head"]:
        """The sum over all components: the query, key or value vector itself, float64."""
        return self.kinds.sum(1)

    @cached_property
    def inside(self) -> Bool[Tensor, "pos slot"]:
        """Which slots hold a feature."""
        return torch.arange(self.exact.shape[1], device=self.counts.device) < self.counts[:, None]

    def without(
        self, pos: Int[Tensor, "edge"], slots: Int[Tensor, "edge top"]
    ) -> Float[Tensor, "edge top d_head"]:
        """The whole vector after one feature was subtracted from the stream, norms responding.

        q' = (sigma / sigma') (q_lin - q_f) + q_const, with QK-norm times rms(q) / rms(q').
        """
        at = pos[:, None], slots
        whole, constant = self.whole[pos], self.constant[pos]
        vector = _without(whole, constant, self.exact[at], self.regrow[at])
        return vector if self.head_regrow is None else self.head_regrow[at][..., None] * vector


@dataclass(frozen=True)
class Kinds:
    """One side of one head over a whole prompt, as the sum of its kinds of component."""

    plain_kinds: Float[Tensor, "pos kind d_head"]
    """Before norm and rotation."""
    plain_constant: Float[Tensor, "d_head"]
    norm: Norm | None
    rotary: Rotary | None

    @cached_property
    def norm_sigma(self) -> Float[Tensor, "pos"] | None:
        """What the norm of the head's vectors divides by, if there is one."""
        return None if self.norm is None else self.norm.sigma(self.plain_kinds.sum(1))

    @cached_property
    def kinds(self) -> Float[Tensor, "pos kind d_head"]:
        """The kinds of every position, as the head sees them."""
        return self._seen(self.plain_kinds, None)

    @cached_property
    def whole(self) -> Float[Tensor, "pos d_head"]:
        """The query, key or value vectors of every position."""
        return self.kinds.sum(1)

    def _seen(
        self, plain: Float[Tensor, "n *rest d_head"], positions: Int[Tensor, "n"] | None
    ) -> Float[Tensor, "n *rest d_head"]:
        """Behind the head's norm, its scale frozen, and rotated; of all positions by default."""
        if self.norm is not None and self.norm_sigma is not None:
            sigma = self.norm_sigma if positions is None else self.norm_sigma[positions]
            plain = self.norm.linear(plain) / sigma.view(-1, *(1,) * (plain.ndim - 1))
        if self.rotary is None:
            return plain
        rotary = self.rotary if positions is None else self.rotary.at(positions)
        return rotary.rotate(plain)


@dataclass(frozen=True)
class Side(Kinds):
    """One side of one head over a whole prompt, with its features."""

    prepared: Prepared
    table: Float[Tensor, "unique d_head"]
    """Directions through the weights: before coefficients, norm and rotation."""
    plain_parts: Float[Tensor, "pos part d_head"]
    """Members of kinds, before norm and rotation."""

    @cached_property
    def parts(self) -> Float[Tensor, "pos part d_head"]:
        """The members of kinds, as the head sees them."""
        return self._seen(self.plain_parts, None)

    @cached_property
    def entries(self) -> Keys:
        """All active entries, as the head sees them; from then on `at` takes them from here."""
        prepared, active = self.prepared, self.prepared.components.active
        width = self.table.shape[1]
        vectors = self.table.new_empty(len(active.ids), width)
        for some in torch.arange(len(vectors), device=vectors.device).split(
            prepared.chunk // width + 1
        ):
            vectors[some] = self._seen(self._plain(some), active.positions[some])
        return Keys(vectors, active.ptr, prepared.columns, *prepared.by_feature)

    def at(self, positions: Int[Tensor, "n"]) -> Projected:
        """The features of some positions, one slot at least."""
        prepared, active = self.prepared, self.prepared.components.active
        index, inside = active.entries(positions)
        if not len(active.ids):
            columns, regrow = index, self.plain_kinds.new_zeros(index.shape)
            exact = self.plain_kinds.new_zeros(*index.shape, self.plain_kinds.shape[-1])
        else:
            columns, regrow = (
                part[index].where(inside, 0) for part in (prepared.columns, prepared.regrow)
            )
            exact = self._exact(index, inside, positions)
        constant = self.plain_constant.to(exact).expand(len(positions), -1)
        return Projected(
            exact,
            active.counts[positions],
            columns,
            self.kinds[positions],
            self.parts[positions],
            self._seen(constant, positions),
            regrow,
            self._head_regrow(index, inside, positions),
            prepared.dtype,
        )

    def _exact(
        self,
        index: Int[Tensor, "n slot"],
        inside: Bool[Tensor, "n slot"],
        positions: Int[Tensor, "n"],
    ) -> Float[Tensor, "n slot d_head"]:
        """The features of some positions by slot, 0 where there is none."""
        prepared, rotary = self.prepared, self.rotary
        cached = "entries" in self.__dict__
        if cached or self.norm is not None:
            made = self.entries.vectors[index] if cached else self._plain(index)
            found = made if cached else self._seen(made, positions)
            return found if inside.all() else found.where(inside[..., None], 0)
        entries, counts = index[inside], inside.sum(1)
        turned = {} if rotary is None else rotary.at(positions)._asdict()
        return feature_rows(
            self.table,
            prepared.columns[entries],
            prepared.coefs[entries],
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            index.shape[1],
            **turned,
        )

    def _plain(self, entries: Int[Tensor, "*n"]) -> Float[Tensor, "*n d_head"]:
        """Active entries before norm and rotation."""
        prepared = self.prepared
        return self.table[prepared.columns[entries]] * prepared.coefs[entries][..., None]

    def _head_regrow(
        self,
        entries: Int[Tensor, "n slot"],
        inside: Bool[Tensor, "n slot"],
        positions: Int[Tensor, "n"],
    ) -> Float[Tensor, "n slot"] | None:
        if self.norm is None or self.norm_sigma is None:
            return None
        if not len(self.prepared.columns):
            return self.plain_kinds.new_zeros(entries.shape)
        whole = self.plain_kinds[positions].sum(1)
        constant = self.plain_constant.to(whole).expand(len(positions), -1)
        plain, regrow = self._plain(entries), self.prepared.regrow[entries]
        after = self.norm.sigma(_without(whole, constant, plain, regrow))
        return (self.norm_sigma[positions, None] / after).where(inside & (after > 0), 0)


def project(
    weights: HeadWeights,
    side: SideName,
    head: int,
    prepared: Prepared,
    rotary: Rotary | None,
    table: Float[Tensor, "unique d_head"] | None = None,
) -> Side:
    """One side of one head (`head` is the kv head for keys and values), rotated where it has to
    be; `table`, if it is there already: the prompt's directions through the head's weights."""
    W, sigma, parts = weights.folded[side][head], prepared.sigma, prepared.components.parts
    found = project_kinds(weights, side, head, prepared.components, sigma, rotary)
    members = found.plain_kinds.new_zeros(len(sigma), len(parts), W.shape[1])
    for i, part in enumerate(parts):
        members[:, i] = part.vectors.to(members) @ W / sigma[:, None]
    table = prepared.pushed(W) if table is None else table
    kinds = found.plain_kinds, found.plain_constant, found.norm, found.rotary
    return Side(*kinds, prepared, table, members)


def project_kinds(
    weights: HeadWeights,
    side: SideName,
    head: int,
    parts: Components,
    sigma: Float[Tensor, "pos"],
    rotary: Rotary | None,
) -> Kinds:
    """The kinds alone: nothing is made of single features; `sigma`: what the layer's norm divides
    by."""
    W = weights.folded[side][head]
    kinds = torch.stack([part @ W for part in (parts.sparse_sum, *parts.named.values())], 1)
    kinds /= sigma[:, None, None]
    constant = weights.constants[side][head].to(kinds)
    kinds[:, parts.kinds.index("bias")] += constant
    if rotary is not None:
        rotary = None if side == "value" else Rotary(rotary.cos.to(kinds), rotary.sin.to(kinds))
    return Kinds(kinds, constant, weights.head_norm(side), rotary)


def _without(
    whole: Float[Tensor, "n d_head"],
    constant: Float[Tensor, "n d_head"],
    features: Float[Tensor, "n slot d_head"],
    regrow: Float[Tensor, "n slot"],
) -> Float[Tensor, "n slot d_head"]:
    """(sigma / sigma') (q_lin - q_f) + q_const for each feature f."""
    linear = (whole - constant)[:, None] - features
    return regrow[..., None] * linear + constant[:, None]

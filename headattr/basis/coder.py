"""A dictionary at work: its tensors in the model's type and on its device.

What it makes of a prompt's vectors are its own activations, to the last bit those of the library
that trained it where that library is sae_lens. A matrix that is too large to keep is read some
features at a time.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.active import ACTIVATIONS, ActiveFeatures, active_of, joined
from headattr.basis.component import check_numbers
from headattr.basis.dictionary import Dictionary, Tensors
from headattr.basis.rows import WHOLE, Matrix, StoredRows, mapped, matrix
from headattr.errors import DictionaryError

_LAYER_NORM_EPS = 1e-5  # what sae_lens adds to the deviation of its input
_SOME_OF_ALL = ("topk", "rawtopk", "abstopk")  # kinds that choose among all features


class Seen(NamedTuple):
    """How a dictionary sees each position: u = read_scale (x - mean), x ~ scale * output + mean."""

    scale: Float[Tensor, "pos"]
    read_scale: Float[Tensor, "pos"]
    mean: Float[Tensor, "pos"]


class Coder:
    """The tensors of one dictionary, ready to encode, to write and to be read with."""

    def __init__(
        self,
        dictionary: Dictionary,
        dtype: torch.dtype,
        device: torch.device,
        numbers: int | None = None,
    ) -> None:
        """Reads them. `numbers`: of all dictionaries that are loaded with it, by default its own;
        many are left where they are. Raises DictionaryError for shapes or numbers that cannot be.
        """
        self.dictionary, self.dtype, self.device = dictionary, dtype, device
        self._whole = (dictionary.numbers if numbers is None else numbers) <= WHOLE
        tensors, self.hash = dictionary.read()
        _check(dictionary, tensors)
        self._tensors = tensors
        self.W_enc = tuple(matrix(W, dtype, device, whole=self._whole) for W in tensors.W_enc)
        self._factor = self._row_factor(tensors)
        self._W_dec = tuple(matrix(W, dtype, device, whole=self._whole) for W in tensors.W_dec)
        self.b_dec = tuple(None if b is None else b.to(device, dtype) for b in tensors.b_dec)
        self.W_skip = None if tensors.W_skip is None else tensors.W_skip.to(device, dtype)
        self.b_enc, self.threshold, self.b_gate = (
            None if part is None else part.to(device, dtype)
            for part in (tensors.b_enc, tensors.threshold, tensors.b_gate)
        )
        gain = tensors.r_mag
        self._gain = None if gain is None else gain.to(device, dtype).exp()
        self._norms = None
        if tensors.by_norm:
            self._norms = tensors.W_dec[0].to(device, dtype).norm(dim=-1)
        self._pursuit = None
        if tensors.pursuit is not None:
            self._pursuit = tensors.pursuit.to(device=device, dtype=dtype).eval()

    def directions(self, write: int = 0) -> Matrix:
        """What a feature of activation 1 writes at a site, in the dictionary's own units."""
        return self._directions[write]

    @cached_property
    def _directions(self) -> tuple[Matrix, ...]:
        if self._factor is None:
            return self._W_dec
        stored = self._tensors.W_dec
        fit = self.dtype, self.device, self._factor
        return tuple(matrix(W, *fit, whole=self._whole) for W in stored)

    def bias(self, write: int, x: Float[Tensor, "pos d_out"]) -> Float[Tensor, "pos d_out"]:
        """What is written at every position of a site, activations apart; `x`: the site's own
        vectors."""
        b_dec, seen = self.b_dec[write], self.seen(x)
        found = seen.mean[:, None].expand_as(x)
        return found if b_dec is None else seen.scale[:, None] * b_dec + found

    def skip(self, x: Float[Tensor, "pos d_in"]) -> Float[Tensor, "pos d_out"] | None:
        """The skip path of the input, if there is one."""
        return None if self.W_skip is None else x @ self.W_skip

    @property
    def encodes_linearly(self) -> bool:
        """Is a pre-activation a row times the input?"""
        return self.dictionary.activation.kind != "matching_pursuit"

    def read_rows(self, read: int = 0) -> Matrix:
        """What a feature reads of a site: pre-activations are these rows times what `seen` makes of
        it, and a constant."""
        rows, frame = self.W_enc[read], self.dictionary.frame
        for part in (self._gain, self._norms):
            if part is not None and isinstance(rows, Tensor):
                rows = rows * part[:, None]
            elif part is not None:
                stored = self._tensors.W_enc[read]
                rows = StoredRows(stored, part, self.dtype, self.device)
        if frame.centred or frame.normalize == "layer_norm":
            return mapped(rows, lambda some: some - some.mean(-1, keepdim=True))
        return rows.contiguous() if isinstance(rows, Tensor) else rows

    def seen(self, x: Float[Tensor, "pos d"]) -> Seen:
        """What the frame does at every position of a site."""
        frame = self.dictionary.frame
        mean, ones = x.mean(-1), torch.ones_like(x[:, 0])
        if frame.normalize == "layer_norm":
            std = (x - mean[:, None]).std(-1)
            found = Seen(std, 1 / (std + _LAYER_NORM_EPS), mean)
        else:
            mean = mean if frame.centred else torch.zeros_like(mean)
            found = Seen(ones / frame.scale, ones * frame.scale, mean)
            if frame.normalize == "constant_norm_rescale":
                scale = (x - mean[:, None]).norm(dim=-1) / x.shape[-1] ** 0.5
                found = Seen(scale, 1 / scale, mean)
        return found if frame.undone else Seen(ones, found.read_scale, 0 * mean)

    @torch.no_grad()
    def encode(
        self, inputs: Sequence[Float[Tensor, "pos d_in"]], numbers: int = ACTIVATIONS
    ) -> ActiveFeatures:
        """The active features of every position; `inputs`: the vectors of each site that it reads;
        at most `numbers` activations are there at once (one position's at least)."""
        features, d_in = self.dictionary.features, self.dictionary.d_in
        block = max(1, min(features, WHOLE // max(1, d_in)))
        step = max(1, numbers // block)
        us = [self._into(x) for x in inputs]
        parts = []
        for start in range(0, len(us[0]), step):
            some = [u[start : start + step] for u in us]
            whole = block == features
            parts.append(active_of(self._acts(some)) if whole else self._by_blocks(some, block))
        return joined(parts)

    def _into(self, x: Float[Tensor, "pos d_in"]) -> Float[Tensor, "pos d_in"]:
        """What is multiplied with the encoder."""
        frame = self.dictionary.frame
        if frame.centred:
            x = x - x.mean(-1, keepdim=True)
        x = x * frame.scale
        if self._pursuit is not None:
            return x
        if frame.normalize == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.std(-1, keepdim=True) + _LAYER_NORM_EPS)
        elif frame.normalize == "constant_norm_rescale":
            x = x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True))
        b_dec = self.b_dec[0]
        return x - b_dec if frame.subtract_b_dec and b_dec is not None else x

    def _acts(self, us: Sequence[Tensor]) -> Float[Tensor, "some features"]:
        """All activations of some positions."""
        if self._pursuit is not None:
            return self._pursuit.encode(us[0])
        pre = self._pre(us, slice(None))
        activation = self.dictionary.activation
        if activation.kind not in _SOME_OF_ALL:
            return self._one_by_one(pre, us, slice(None))
        assert activation.k is not None
        sizes = pre.abs() if activation.kind == "abstopk" else pre
        ids = sizes.topk(min(activation.k, pre.shape[1]), -1).indices
        kept = pre.gather(1, ids)
        kept = kept.relu() if activation.kind == "topk" else kept
        return torch.zeros_like(pre).scatter_(1, ids, kept)

    def _pre(self, us: Sequence[Tensor], some: slice) -> Float[Tensor, "pos some"]:
        """Pre-activations of some features (of the gate, where there is one)."""
        pre = us[0] @ self.W_enc[0][some].T
        for u, W in zip(us[1:], self.W_enc[1:], strict=True):
            pre = pre + u @ W[some].T
        bias = self.b_enc if self.b_gate is None else self.b_gate
        pre = pre if bias is None else pre + bias[some]
        return pre if self._norms is None else pre * self._norms[some]

    def _one_by_one(
        self, pre: Float[Tensor, "pos some"], us: Sequence[Tensor], some: slice
    ) -> Float[Tensor, "pos some"]:
        """Activations that depend on a feature's own pre-activation alone."""
        kind = self.dictionary.activation.kind
        if kind == "gated":
            assert self._gain is not None
            assert self.b_enc is not None
            rows = self.W_enc[0][some] * self._gain[some, None]
            return (us[0] @ rows.T + self.b_enc[some]).relu() * (pre > 0)
        if kind == "relu":
            return pre.relu()
        assert self.threshold is not None
        threshold = self.threshold[some] if self.threshold.ndim else self.threshold
        return pre.relu() * (pre > threshold)

    def _by_blocks(self, us: Sequence[Tensor], block: int) -> ActiveFeatures:
        """Some positions, some features at a time."""
        activation, found = self.dictionary.activation, []
        for start in range(0, self.dictionary.features, block):
            some = slice(start, min(start + block, self.dictionary.features))
            pre = self._pre(us, some)
            if activation.kind in _SOME_OF_ALL:
                assert activation.k is not None
                sizes = pre.abs() if activation.kind == "abstopk" else pre
                ids = sizes.topk(min(activation.k, pre.shape[1]), -1).indices
                found.append((ids + start, pre.gather(1, ids)))
            else:
                pos, ids = (acts := self._one_by_one(pre, us, some)).nonzero(as_tuple=True)
                found.append((pos, ids + start, acts[pos, ids]))
        if activation.kind in _SOME_OF_ALL:
            ids, pre = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
            sizes = pre.abs() if activation.kind == "abstopk" else pre
            best = sizes.topk(min(activation.k or 0, pre.shape[1]), -1).indices
            ids, acts = ids.gather(1, best), pre.gather(1, best)
            acts = acts.relu() if activation.kind == "topk" else acts
            pos, slot = acts.nonzero(as_tuple=True)
            ids, acts = ids[pos, slot], acts[pos, slot]
        else:
            pos, ids, acts = (torch.cat(parts) for parts in zip(*found, strict=True))
        order = (pos * self.dictionary.features + ids).argsort()
        counts = torch.bincount(pos, minlength=len(us[0]))
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return ActiveFeatures(ptr, ids[order], acts[order])

    def _row_factor(self, tensors: Tensors) -> Float[Tensor, "features"] | None:
        """What decoder rows are multiplied by."""
        factor = tensors.factor
        found = None if factor is None else factor.to(self.device, self.dtype)
        if tensors.by_norm:
            norms = tensors.W_dec[0].to(self.device, self.dtype).norm(dim=-1)
            return 1 / norms if found is None else found / norms
        return found


def _check(dictionary: Dictionary, tensors: Tensors) -> None:
    """Refuse tensors of other shapes than the description's, and numbers that are none."""
    features, d_in, d_out = dictionary.features, dictionary.d_in, dictionary.d_out
    expected = {
        **{f"W_enc.{i}": (features, d_in) for i in range(len(tensors.W_enc))},
        **{f"W_dec.{i}": (features, d_out) for i in range(len(tensors.W_dec))},
        **{f"b_dec.{i}": (d_out,) for i, b in enumerate(tensors.b_dec) if b is not None},
        "W_skip": (d_in, d_out),
    }
    named = {f"W_enc.{i}": W for i, W in enumerate(tensors.W_enc)}
    named |= {f"W_dec.{i}": W for i, W in enumerate(tensors.W_dec)}
    named |= {f"b_dec.{i}": b for i, b in enumerate(tensors.b_dec) if b is not None}
    rest = ("b_enc", "threshold", "b_gate", "r_mag", "factor", "W_skip")
    named |= {name: part for name in rest if (part := getattr(tensors, name)) is not None}
    for name, tensor in named.items():
        wanted = expected.get(name, (features,))
        one = name == "threshold" and tensor.ndim == 0
        if tuple(tensor.shape) != wanted and not one:
            raise DictionaryError(
                f"{dictionary.name}: {name} is {tuple(tensor.shape)} as rows of features; expected "
                f"{wanted}"
            )
    where = dictionary.path or dictionary.name
    check_numbers({name.removesuffix(".0"): part for name, part in named.items()}, where)

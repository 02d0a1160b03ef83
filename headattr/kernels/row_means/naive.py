"""The definition of row_means, in loops."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.kernels.row_means.batched import Keys, Rows


def by_feature(
    keys: Keys, weight: Float[Tensor, "row k_pos"], Q: Float[Tensor, "row d"], features: int
) -> Float[Tensor, "row column"]:
    """As `batched.by_feature`, one entry after the other."""
    sums = weight.new_zeros(len(weight), features)
    for row in range(len(weight)):
        for position in range(weight.shape[1]):
            for entry in range(int(keys.ptr[position]), int(keys.ptr[position + 1])):
                product = torch.dot(Q[row], keys.vectors[entry])
                sums[row, keys.columns[entry]] += weight[row, position] * product
    return sums


def differences(
    keys: Keys,
    rows: Rows,
    q_at: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    slots: Int[Tensor, "edge n"],
) -> Float[Tensor, "edge n d"]:
    """As `batched.differences`, one feature after the other."""
    out = keys.vectors.new_zeros(*slots.shape, keys.vectors.shape[1])
    for edge in range(len(q_at)):
        row, key = int(q_at[edge]), int(k_pos[edge])
        for n, slot in enumerate(slots[edge].tolist()):
            if slot < 0:
                continue
            here = int(keys.ptr[key]) + slot
            out[edge, n] = rows.ratio[row, key] * keys.vectors[here]
            for j in range(rows.start + row + 1):
                for entry in range(int(keys.ptr[j]), int(keys.ptr[j + 1])):
                    if keys.columns[entry] == keys.columns[here]:
                        out[edge, n] -= rows.weight[row, j] * keys.vectors[entry]
    return out


def pair_contrasts(
    left: Float[Tensor, "row slot d"],
    keys: Keys,
    rows: Rows,
    q_at: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    q_slots: Int[Tensor, "edge k"],
    k_slots: Int[Tensor, "edge k"],
) -> Float[Tensor, "edge k"]:
    """As `batched.pair_contrasts`, one pair after the other."""
    right = differences(keys, rows, q_at, k_pos, k_slots)
    out = left.new_zeros(k_slots.shape)
    for edge in range(len(q_at)):
        for n, slot in enumerate(q_slots[edge].tolist()):
            if slot >= 0:
                out[edge, n] = torch.dot(left[q_at[edge], slot], right[edge, n])
    return out

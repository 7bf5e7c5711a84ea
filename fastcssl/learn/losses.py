"""Defines the losses of the methods and strategies as pure functions of embeddings, without state or detaching.

Training minimises the mean of the ranks' losses, and all ranks have the same number of rows. So a mean over samples is
computed locally. Batch statistics (Barlow, VICReg) and negatives from the batch span the ranks of `world`'s scope.
Everything is computed in float32 or float64, also under autocast. N samples on this rank, G in the scope, M rows of a
loss.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fastcssl import ops
from fastcssl.distributed.world import World

BARLOW_EPS = 1e-5  # of the BatchNorm that the reference standardises with
VICREG_EPS = 1e-4


def cosine(p_ND: Tensor, f_ND: Tensor) -> Tensor:
    """Returns the mean cosine."""
    p_ND, f_ND = _pair(p_ND, f_ND)
    return (functional.normalize(p_ND, dim=1) * functional.normalize(f_ND, dim=1)).sum(dim=1).mean()


def cosine_distance(p_ND: Tensor, z_ND: Tensor) -> Tensor:
    """Returns the mean of 2 - 2 cos, the squared distance of the unit vectors. BYOL's loss is the sum of two."""
    return 2 - 2 * cosine(p_ND, z_ND)


def mean_squared(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    """Returns the mean squared difference over samples and dimensions."""
    a_ND, b_ND = _pair(a_ND, b_ND)
    return (a_ND - b_ND).square().mean()


def symmetric_contrast(p_MD: Tensor, f_MD: Tensor, temperature: float, world: World) -> Tensor:
    """Returns 1/2 [E(p, f) + E(f, p)]. In E(a, b), row i of a must find row i of b among all rows of b in the scope.

    This is CaSSLe's align for contrastive methods. The rows are the stacked views; this function normalises them.
    """
    p_MD, f_MD = (functional.normalize(x_MD, dim=1) for x_MD in _pair(p_MD, f_MD))
    # The positive is among the keys, so it is already in the denominator.
    p_to_f_M = ops.info_nce(p_MD, f_MD, [world.gather(f_MD)], temperature, positive_in_denominator=False)
    f_to_p_M = ops.info_nce(f_MD, p_MD, [world.gather(p_MD)], temperature, positive_in_denominator=False)
    return (p_to_f_M.mean() + f_to_p_M.mean()) / 2


def with_negative(loss_M: Tensor, positive_logit_M: Tensor, extra_logit_M: Tensor) -> Tensor:
    """Returns a loss of `ops.info_nce` with one more logit in each row's denominator, which must not be empty."""
    return torch.logaddexp(loss_M + positive_logit_M, extra_logit_M) - positive_logit_M


def contrast_among(
    query_MD: Tensor, positive_MD: Tensor, keys: Sequence[tuple[Tensor, Tensor]], temperature: float
) -> Tensor:
    """Returns `ops.info_nce` within a batch, with a mask [M, K] for each [K, D] of keys.

    Masked keys are not in the denominator. The positive is in it only if it is among the keys. A row that sees no key
    has loss 0 and no gradient.
    """
    with torch.autocast(query_MD.device.type, enabled=False):
        scaled_MD = _wide(query_MD) / temperature
        logits = [(scaled_MD @ _wide(keys_KD).T).masked_fill(hidden_MK, -math.inf) for keys_KD, hidden_MK in keys]
        lse_M = torch.cat(logits, dim=1).logsumexp(dim=1)
        return (lse_M - (scaled_MD * _wide(positive_MD)).sum(dim=1)).masked_fill(lse_M == -math.inf, 0)


def label_positive(label_M: Tensor, z_GD: Tensor, label_G: Tensor, own_M: Tensor) -> Tensor:
    """Returns SupCon's positive [M, D]: the mean of the rows of z with row i's label, without its own row own_M[i].

    Logits are linear in the key, so the mean of the losses over the positives is the loss of the mean positive. A label
    that no other row has gives 0; with two views of each sample this does not happen.
    """
    column_G = torch.arange(len(z_GD), device=z_GD.device)
    with torch.autocast(z_GD.device.type, enabled=False):
        z_GD = _wide(z_GD)
        chosen_MG = ((label_M[:, None] == label_G) & (column_G != own_M[:, None])).to(z_GD.dtype)
        return chosen_MG @ z_GD / chosen_MG.sum(dim=1, keepdim=True).clamp_min(1)


def barlow(
    z1_ND: Tensor,
    z2_ND: Tensor,
    world: World,
    *,
    off_diagonal_weight: float = 5e-3,
    scale: float = 0.1,
    gradient: Literal["exact", "reference"] = "exact",
) -> Tensor:
    """Returns scale x [sum_i (1 - C_ii)^2 + off_diagonal_weight x sum_(i != j) C_ij^2].

    C is the cross-correlation over the scope. With gradient "reference", ranks behave as in CaSSLe and PNR: each rank
    standardises by its own batch, and autograd ignores the all-reduce of C, which divides the gradient by the
    number of ranks. On one rank, "exact" and "reference" are the same.
    """
    if gradient not in ("exact", "reference"):
        raise ValueError(f"gradient is {gradient!r}; use 'exact' or 'reference'.")
    z1_ND, z2_ND = _pair(z1_ND, z2_ND)
    num_rows, dim = z1_ND.shape
    standardised_over = world if gradient == "exact" else World()
    with torch.autocast(z1_ND.device.type, enabled=False):
        both = _centred(torch.cat([z1_ND, z2_ND], dim=1), standardised_over)
        variance = standardised_over.total(both.square().sum(dim=0)) / (num_rows * standardised_over.count)
        u1_ND, u2_ND = (both / (variance + BARLOW_EPS).sqrt()).tensor_split(2, dim=1)
        part_DD = u1_ND.T @ u2_ND / (num_rows * world.count)
        if gradient == "exact":
            c_DD = world.total(part_DD)
        else:
            c_DD = world.total(part_DD.detach()) + (part_DD - part_DD.detach())
        error_DD = c_DD - torch.eye(dim, dtype=c_DD.dtype, device=c_DD.device)
        everywhere, diagonal = error_DD.square().sum(), error_DD.diagonal().square().sum()
        return scale * (off_diagonal_weight * everywhere + (1 - off_diagonal_weight) * diagonal)


def vicreg(
    z1_ND: Tensor,
    z2_ND: Tensor,
    world: World,
    *,
    similarity: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> Tensor:
    """Returns VICReg's loss: similarity x mean_squared, and for each view two more terms.

    These are variance x mean relu(1 - std) and covariance x sum_(i != j) cov_ij^2 / D. std and cov are the unbiased
    estimates over the scope.
    """
    z1_ND, z2_ND = _pair(z1_ND, z2_ND)
    num_total, dim = len(z1_ND) * world.count, z1_ND.shape[1]
    if num_total < 2:
        raise ValueError(f"vicreg: a variance needs at least 2 samples, but the batch has {num_total}.")
    with torch.autocast(z1_ND.device.type, enabled=False):
        both = _centred(torch.cat([z1_ND, z2_ND], dim=1), world)
        cov_2DD = world.total(torch.stack([z_ND.T @ z_ND for z_ND in both.tensor_split(2, dim=1)])) / (num_total - 1)
        variance_2D = cov_2DD.diagonal(dim1=1, dim2=2)
        lacking = functional.relu(1 - (variance_2D + VICREG_EPS).sqrt()).mean(dim=1).sum()
        off_diagonal = (cov_2DD - torch.diag_embed(variance_2D)).square().sum() / dim
        return similarity * mean_squared(z1_ND, z2_ND) + variance * lacking + covariance * off_diagonal


def _centred(z_ND: Tensor, world: World) -> Tensor:
    return z_ND - world.total(z_ND.sum(dim=0)) / (len(z_ND) * world.count)


def _pair(a_ND: Tensor, b_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in float32 or float64. Checks the shapes, because torch would broadcast a single row."""
    if a_ND.dim() != 2 or a_ND.shape != b_ND.shape:
        raise ValueError(f"embeddings must be two [N, D] of one shape, but are {[*a_ND.shape]} and {[*b_ND.shape]}.")
    return _wide(a_ND), _wide(b_ND)


def unit(z_ND: Tensor) -> Tensor:
    """Returns rows of unit length, in float32 or float64. In bfloat16 they would be off by 0.4 %."""
    return functional.normalize(_wide(z_ND), dim=1)


def _wide(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()

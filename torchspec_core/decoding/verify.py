"""Lossless verification of drafted tokens, as pure functions on batches.

Whatever the drafter proposes, the tokens that come out follow the target's own law: exactly its argmax at temperature
zero, exactly its distribution after temperature and top_p otherwise (speculative sampling, arXiv 2211.17192, standard
rule). Distributions are fp32; acceptance compares `u * Q(x) < P(x)`, so nothing is divided; the numbers that draw
drafts, decide acceptance and draw the last token must be independent of each other, which is why they are arguments.

Shape legend: B rows, K drafted tokens a row, V target vocabulary. P is the target's distribution, Q the one that the
drafted token was really drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Nuclei are mostly narrow: look among this many tokens first, and sort the whole vocabulary only for the rows that
# need it.
NUCLEUS_WIDTH = 512


@dataclass(frozen=True)
class Verdict:
    """What one verification step decided.

    accepted: [B] int64, drafted tokens accepted, 0..K.
    following: [B] int64, the token after them: the correction of the first rejected draft, or the bonus token.
    """

    accepted: Tensor
    following: Tensor


def distribution(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Softmax of `logits[N, V]` at `temperature` > 0, restricted to the top_p nucleus and renormalised; fp32 [N, V].

    The nucleus is the smallest set of most probable tokens whose mass reaches `top_p`.
    """
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1.0 or probabilities.shape[0] == 0:
        return probabilities
    kept = _nucleus(probabilities, top_p, min(NUCLEUS_WIDTH, probabilities.shape[-1]))
    return kept / kept.sum(dim=-1, keepdim=True)


def _nucleus(probabilities: Tensor, top_p: float, width: int) -> Tensor:
    """`probabilities[N, V]` with everything outside the nucleus set to zero, not renormalised."""
    values, ids = probabilities.topk(width, dim=-1)
    mass = values.cumsum(dim=-1)
    kept = torch.zeros_like(probabilities).scatter_(-1, ids, torch.where(mass - values < top_p, values, 0.0))
    if width < probabilities.shape[-1]:
        wide = (mass[:, -1] < top_p).nonzero().squeeze(-1)
        if len(wide):
            kept[wide] = _nucleus(probabilities[wide], top_p, probabilities.shape[-1])
    return kept


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """One token a row of `weights[N, V]` (not negative, any positive sum), by inversion of `u[N]` in [0, 1); int64 [N].

    A token of weight zero is never drawn. Sums are fp64: 50,000 fp32 terms would lose the tail.
    """
    mass = weights.double().cumsum(dim=-1)
    total = mass[:, -1:]
    # The largest double below the total keeps the search inside the support where u * total rounds up to the total.
    point = torch.minimum(u.double().unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, point, right=True).squeeze(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights [N, V] of the token that replaces a rejected one: max(P - Q, 0), not normalised."""
    return (p - q).clamp_(min=0.0)


def verify_greedy(logits: Tensor, drafts: Tensor, limits: Tensor | None = None) -> Verdict:
    """Verify `drafts[B, K]` int64 at temperature zero; `logits[B, K+1, V]` are the target's after the root and each
    draft. limits: [B] int64, how many leading drafts count (all of them).

    A draft is accepted while it equals the target's argmax; the following token is the argmax after the last accepted
    one.
    """
    best = logits.argmax(dim=-1)
    matches = (best[:, :-1] == drafts).long()
    if limits is not None:
        matches = matches * (torch.arange(drafts.shape[1], device=drafts.device) < limits.unsqueeze(1))
    accepted = matches.cumprod(dim=-1).sum(dim=-1)
    return Verdict(accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1))


def verify_sampled(
    logits: Tensor,
    drafts: Tensor,
    q: Tensor | None,
    u: Tensor,
    temperature: float,
    top_p: float = 1.0,
    limits: Tensor | None = None,
) -> Verdict:
    """Verify `drafts[B, K]` int64 against the target at `temperature` > 0 and `top_p`.

    logits: [B, K+1, V], the target's, after the root and after each draft.
    q: [B, K, V] fp32, the law each draft was drawn from; None = drafted greedily, Q puts all on the draft.
    u: [B, K+1] uniform in [0, 1): K to accept, the last to draw the following token.
    limits: [B] int64, how many leading drafts of each row count (all of them); the rest was never proposed.

    Slots are worked through in order on the rows still alive: P is made only where it can matter, which is what a sort
    of the vocabulary costs most.
    """
    rows, slots = drafts.shape
    accepted = torch.zeros(rows, dtype=torch.int64, device=drafts.device)
    following = torch.zeros_like(accepted)
    alive = torch.arange(rows, device=drafts.device)
    for slot in range(slots):
        if limits is not None:
            ended = alive[limits[alive] == slot]
            if len(ended):
                following[ended] = draw(distribution(logits[ended, slot], temperature, top_p), u[ended, slots])
                alive = alive[limits[alive] != slot]
        p = distribution(logits[alive, slot], temperature, top_p)
        token = drafts[alive, slot].unsqueeze(1)
        q_slot = torch.zeros_like(p).scatter_(1, token, 1.0) if q is None else q[alive, slot]
        accept = (u[alive, slot] * q_slot.gather(1, token).squeeze(1)) < p.gather(1, token).squeeze(1)
        refused = (~accept).nonzero().squeeze(1)
        if len(refused):
            weights = residual(p[refused], q_slot[refused])
            # A refusal where P equals Q up to rounding leaves nothing over; P itself is then the law.
            weights = torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, p[refused])
            following[alive[refused]] = draw(weights, u[alive[refused], slots])
        alive = alive[accept]
        accepted[alive] += 1
    if len(alive):
        following[alive] = draw(distribution(logits[alive, slots], temperature, top_p), u[alive, slots])
    return Verdict(accepted, following)


def verify_block(
    logits: Tensor,
    drafts: Tensor,
    q: Tensor | None,
    u: Tensor,
    temperature: float,
    top_p: float = 1.0,
    limits: Tensor | None = None,
) -> Verdict:
    """`verify_sampled` by block verification (arXiv 2403.10444): the same output law, never fewer drafts on average.

    Slots are not judged one by one. The prefix of i drafts carries pi_i = min(pi_{i-1} P_i(x_i) / Q_i(x_i), 1), and the
    longest prefix that passes its own test u_i <= h_i is kept, where s_i = sum max(pi_i P_{i+1} - Q_{i+1}, 0),
    h_i = s_i / (s_i + 1 - pi_i) for i < K and h_K = pi_K. The next token comes from max(pi_i P_{i+1} - Q_{i+1}, 0).
    A row's own limit takes the place of K.
    """
    rows, slots = drafts.shape
    every = torch.arange(rows, device=drafts.device)
    p = distribution(logits.flatten(0, 1), temperature, top_p).unflatten(0, (rows, slots + 1))
    if q is None:
        q = torch.zeros_like(p[:, :slots]).scatter_(2, drafts.unsqueeze(2), 1.0)
    last = torch.full((rows, 1), slots, device=drafts.device) if limits is None else limits.unsqueeze(1)
    weight = torch.ones(rows, 1, dtype=p.dtype, device=p.device)
    accepted = torch.zeros(rows, dtype=torch.int64, device=drafts.device)
    # Where no draft counts the next token comes from P itself, as it does after a row's last draft.
    left = torch.where(last > 0, residual(p[:, 0], q[:, 0]), p[:, 0]) if slots else p[:, 0]
    for slot in range(slots):
        token = drafts[:, slot].unsqueeze(1)
        drawn = q[:, slot].gather(1, token)
        # A drafted token has Q > 0; the floor only keeps a caller's zero from making NaN.
        weight = (weight * p[:, slot].gather(1, token) / drawn.clamp(min=1e-30)).clamp(max=1.0)
        rest, bound = p[:, slot + 1], weight
        if slot + 1 < slots:
            over = residual(weight * p[:, slot + 1], q[:, slot + 1])
            mass = over.sum(dim=1, keepdim=True)
            rest = torch.where(last == slot + 1, rest, over)
            bound = torch.where(last == slot + 1, bound, mass / (mass + 1.0 - weight).clamp(min=1e-30))
        passed = (u[:, slot].unsqueeze(1) < bound) & (slot < last)
        accepted = torch.where(passed.squeeze(1), slot + 1, accepted)
        left = torch.where(passed, rest, left)
    # Nothing is left over only where P equals Q up to rounding; P itself is then the law.
    left = torch.where(left.sum(dim=1, keepdim=True) > 0, left, p[every, accepted])
    return Verdict(accepted, draw(left, u[:, slots]))

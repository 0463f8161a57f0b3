"""What turns a block's base scores into a chain of tokens: DFlash 2's candidate selector, DSpark's two heads.

All of them look at the token chosen just before; the walk over the slots is the caller's. `Tables` are the target's
frozen embedding and head, which these drafters share.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Tables(NamedTuple):
    """embedding: [V, H] the target's input embedding. head: [V, H] its output head; both frozen."""

    embedding: Tensor
    head: Tensor


class CandidateSelector(nn.Module):
    """Adds to a candidate's base score the edge score <A[previous] * (W_h h), B[candidate]>.

    `free`: A and B are tables [V, R]. `projected`: they are projections of the target's embedding and head rows, which
    train far fewer numbers and cover rare tokens; `codebooks` writes them out as tables.
    """

    def __init__(self, vocab_size: int, size: int, rank: int, codebook: Literal["projected", "free"]) -> None:
        super().__init__()
        self.codebook = codebook
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        if codebook == "free":
            self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
            self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        else:
            self.predecessor_projection = nn.Linear(size, rank, bias=False)
            self.successor_projection = nn.Linear(size, rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor, tables: Tables) -> Tensor:
        """Edge scores [N, C] of candidates [N, C] after `previous` [N] for slots with hidden state [N, H]."""
        if self.codebook == "free":
            query = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
            keys = self.successor_codebook[candidates]
        else:
            # B = head W_B^T, so the query is taken to the head's space instead of every candidate to the rank.
            query = self.predecessor_projection(tables.embedding[previous]) * self.hidden_projection(hidden)
            query = query @ self.successor_projection.weight
            keys = tables.head[candidates]
        return torch.einsum("nr,ncr->nc", query, keys)

    @torch.no_grad()
    def codebooks(self, tables: Tables) -> tuple[Tensor, Tensor]:
        """(A, B) as tables [V, R]."""
        if self.codebook == "free":
            return self.predecessor_codebook, self.successor_codebook
        return (
            functional.linear(tables.embedding, self.predecessor_projection.weight),
            functional.linear(tables.head, self.successor_projection.weight),
        )


class MarkovHead(nn.Module):
    """DSpark's bias W2 W1[previous] on the scores of the next slot; `features` is W1[previous]."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def features(self, previous: Tensor) -> Tensor:
        """[N] tokens to [N, R]."""
        return self.markov_w1(previous)


class ConfidenceHead(nn.Module):
    """Logit that a drafted token is accepted, given that those before it were: w . [h ; W1[previous]] + b."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size + rank, 1)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """[N, H], [N, R] to logits [N]."""
        return self.proj(torch.cat((hidden, features), dim=-1)).squeeze(-1)

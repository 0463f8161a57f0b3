"""DFlash 2's grouped dynamic causal convolution over the slots of a block.

Every sublayer has one: its input side stands before the sublayer, its output side after it, and both take their
coefficients from the sublayer's input: a learned base for each channel plus a part that depends on the token, shared
by the channels of a group. `out[i, c] = sum_t (base[t, c] + delta[i, t, group(c)]) * y[i - t, c]`; slots before the
block's first are zero, so nothing leaks from one block into another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupedDynamicConvolution(nn.Module):
    """The convolution of one sublayer; starts as the identity.

    Args:
        size: channels H.
        kernel_size: taps; tap t reads the slot t places before.
        group_size: channels that share a dynamic coefficient.
    """

    def __init__(self, size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = kernel_size, group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, size))
        self.kernel_projection = nn.Linear(size, 2 * kernel_size * size // group_size, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """The identity: tap 0 passes everything on, nothing depends on the token."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def coefficients(self, x: Tensor) -> Tensor:
        """Sublayer input [M, B, H] to the dynamic coefficients [2, M, B, taps, groups]."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return delta.movedim(-3, 0)

    def side(self, side: int, y: Tensor, coefficients: Tensor) -> Tensor:
        """Convolve [M, B, H] along its slots with the coefficients of one side (0 = input, 1 = output)."""
        delta = coefficients[side]
        grouped = y.unflatten(-1, (-1, self.group_size))
        base = self.base_kernel[side].unflatten(-1, (-1, self.group_size))
        out = (base[0] + delta[..., 0, :].unsqueeze(-1)) * grouped
        for tap in range(1, self.taps):
            shifted = torch.cat((torch.zeros_like(grouped[:, :tap]), grouped[:, :-tap]), dim=1)[:, : y.shape[1]]
            out = out + (base[tap] + delta[..., tap, :].unsqueeze(-1)) * shifted
        return out.flatten(-2)

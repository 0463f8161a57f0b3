"""Which target distributions supervise a drafter.

The target's distribution after reading position t teaches every drafted row i at depth d with i + 1 + d = t. Whether
it counts depends on t alone, in both conventions, so one weight per teacher position covers all depths:

- `predicted`: the token that is predicted, x_{t+1}, is supervised (m_{t+1}; t + 1 inside the document).
- `reference`: what the reference implementations do, two tokens early (m_{t-1}).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

MaskAlignment = Literal["predicted", "reference"]


def teacher_weight(loss_mask: np.ndarray, document: np.ndarray, alignment: MaskAlignment) -> np.ndarray:
    """[N] boolean: the teacher position supervises.

    Args:
        loss_mask: [N] boolean, packed documents.
        document: [N] int64, ascending document of each position.
    """
    weight = np.zeros(len(loss_mask), dtype=bool)
    together = document[1:] == document[:-1]
    if alignment == "predicted":
        weight[:-1] = loss_mask[1:] & together
    else:
        weight[1:] = loss_mask[:-1] & together
    return weight

"""Learning-rate schedules: a factor of the peak rate for each step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def lr_factor(step: int, steps: int, schedule: Schedule, warmup: float, decay: float) -> float:
    """Factor of the rate at `step` (0-based) of `steps`.

    Warm-up rises linearly over `warmup * steps` steps. Then: `constant` stays; `linear` and `cosine` fall to 0 at the
    end; `wsd` stays, and falls linearly to 0 over the last `decay * steps` steps.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    falling = steps - rising if schedule != "wsd" else min(round(decay * steps), steps - rising)
    left = (steps - step) / falling if falling else 1.0
    if schedule == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * min(1.0, left)))
    return min(1.0, left)

"""Hidden states at rest. The file form: `StateSet` reads it, `capture` writes it."""

from torchspec_core.store.files import CorruptStatesError, Problem, StateSet
from torchspec_core.store.format import Layout

__all__ = ["CorruptStatesError", "Layout", "Problem", "StateSet"]

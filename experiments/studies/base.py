"""What a named experiment is. A new one is one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class StudyOptions(ABC):
    """Options of an experiment: plain typed fields with defaults, checked in `__post_init__`."""

    @property
    def own_name(self) -> str:
        """What it is called on the command line."""
        return str(getattr(self, "name", type(self).__name__))

    @abstractmethod
    def prepare(self, overrides: Sequence[str]) -> Callable[[], bool]:
        """What measures, prints and logs it, and says whether all of it could be measured.

        `overrides` are what else the command line says. Checks what can be checked without weights: raises ValueError,
        in one line, for what the user can mend.
        """

"""What the options of an experiment are checked for."""

from __future__ import annotations


def at_least(options: object, least: int, *names: str) -> None:
    """Raise ValueError, in one line, for the first of these options, numbers or lists of them, that is below."""
    for name in names:
        value = getattr(options, name)
        numbers = value if isinstance(value, list) else [value]
        if not numbers or min(numbers) < least:
            expected = "numbers of" if isinstance(value, list) else "a number of"
            raise ValueError(f"experiment.{name}={value}: expected {expected} at least {least}")

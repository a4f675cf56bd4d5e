"""Reward functions as a user would write them, named in tests by import path."""


def even_length(text: str, gold: str) -> float:
    """1 where the answer has an even number of characters: random models earn it about half the time."""
    return float(len(text) % 2 == 0)


def never(text: str, gold: str) -> float:
    """Nothing is ever right."""
    return 0.0


def breaks_on_odd(text: str, gold: str) -> float:
    """Raises for answers of odd length."""
    if len(text) % 2:
        raise RuntimeError("no verdict")
    return float(text < "5")


def always(text: str, gold: str) -> float:
    """Everything is right."""
    return 1.0

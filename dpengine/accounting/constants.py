"""Public constants of a run: number of steps, sampling rate and delta. Integers stay integers."""

from dpengine.errors import InvalidBudgetError

from . import arguments


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns the number of batches in an epoch, ``ceil(num_examples / batch_size)``.

    It is not computed from a rate: ``int(1 / (batch_size / num_examples))`` loses a step for many sizes.

    Args:
        num_examples: Number of examples, at least 1.
        batch_size: Expected batch size, at least 1.

    Returns:
        At least 1.
    """
    rows = arguments.count("num_examples", num_examples)
    return -(-rows // arguments.count("batch_size", batch_size))


def steps_of_epochs(epochs: float, sample_rate: float) -> int:
    """Returns the number of steps in epochs of ``1 / sample_rate`` steps, rounded to the nearest, at least 1.

    If the rate is ``1 / n`` in floating point, this is ``epochs * n``; truncation would lose a step for many n.

    Args:
        epochs: Positive.
        sample_rate: In (0, 1].

    Returns:
        At least 1.
    """
    length = arguments.epsilon_in_range(epochs, "epochs", zero=False)
    return max(1, round(length / arguments.sample_rate(sample_rate)))


def sample_rate_of(num_examples: int, batch_size: int) -> float:
    """Returns the sampling rate, ``batch_size / num_examples`` and at most 1."""
    rows = arguments.count("num_examples", num_examples)
    return min(1.0, arguments.count("batch_size", batch_size) / rows)


def suggested_delta(num_examples: int) -> float:
    """Returns ``num_examples ** -1.1``, which is below the probability of guessing an example at random.

    Args:
        num_examples: Number of examples, at least 2.

    Returns:
        In (0, 1/num_examples).

    Raises:
        InvalidBudgetError: If there is only one example, which no delta protects.
    """
    rows = arguments.count("num_examples", num_examples)
    if rows == 1:
        raise InvalidBudgetError("num_examples=1 leaves no delta below 1/N.", fix="Pass delta explicitly.")
    return float(rows**-1.1)


def check_delta(delta: float, num_examples: int, allow_large: bool = False, name: str = "delta") -> None:
    """Raises if delta is so large that it does not protect single examples."""
    value = arguments.delta_in_range(delta)
    rows = arguments.count("num_examples", num_examples)
    if value >= 1 / rows and not allow_large:
        suggestion = f"Pass {name}={suggested_delta(rows):.1e}." if rows > 1 else ""
        raise InvalidBudgetError(
            f"{name}={value:g} is too large for {rows:,} examples; at 1/N a mechanism may publish a complete record.",
            fix=suggestion,
        )

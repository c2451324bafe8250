"""Public constants of a run: number of steps, sampling rate and delta. Integers stay integers."""

from dpengine.errors import InvalidBudgetError

from . import arguments


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns the number of batches in an epoch, ``ceil(num_examples / batch_size)``.

    Do not compute it from a rate: ``int(1 / (batch_size / num_examples))`` is one step too small for many sizes.

    Args:
        num_examples: Number of examples, at least 1.
        batch_size: Expected batch size, at least 1.

    Returns:
        At least 1.
    """
    size = arguments.count("num_examples", num_examples)
    return -(-size // arguments.count("batch_size", batch_size))


def steps_of_epochs(epochs: float, sample_rate: float) -> int:
    """Returns the number of steps in epochs of ``1 / sample_rate`` steps, rounded to the nearest, at least 1.

    If the rate is ``1 / n`` in floating point, this is ``epochs * n``. Truncation would lose a step for many n.

    Args:
        epochs: Positive.
        sample_rate: In (0, 1].

    Returns:
        At least 1.
    """
    epochs = arguments.epsilon_in_range(epochs, "epochs", zero=False)
    return max(1, round(epochs / arguments.sample_rate(sample_rate)))


def sample_rate_of(num_examples: int, batch_size: int) -> float:
    """Returns the sampling rate, ``batch_size / num_examples`` and at most 1."""
    size = arguments.count("num_examples", num_examples)
    return min(1.0, arguments.count("batch_size", batch_size) / size)


def suggested_delta(num_examples: int) -> float:
    """Returns ``num_examples ** -1.1``, which is below the probability of guessing an example at random.

    Args:
        num_examples: Number of examples, at least 2.

    Returns:
        In (0, 1/num_examples).

    Raises:
        InvalidBudgetError: If there is only one example, because no delta is then below 1/N.
    """
    size = arguments.count("num_examples", num_examples)
    if size == 1:
        raise InvalidBudgetError("num_examples=1 leaves no delta below 1/N.", fix="Pass delta explicitly.")
    return float(size**-1.1)


def check_delta(delta: float, num_examples: int, allow_large: bool = False, name: str = "delta") -> None:
    """Raises if delta is so large that it does not protect single examples."""
    value = arguments.delta_in_range(delta)
    size = arguments.count("num_examples", num_examples)
    if value >= 1 / size and not allow_large:
        suggestion = f"Pass {name}={suggested_delta(size):.1e}." if size > 1 else ""
        raise InvalidBudgetError(
            f"{name}={value:g} is too large for {size:,} examples: at 1/N, a mechanism may publish a complete record.",
            fix=suggestion,
        )

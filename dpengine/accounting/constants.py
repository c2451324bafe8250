"""The public constants of a run: how many steps, at which rate, and which delta makes sense. Integers stay integers."""

from dpengine.errors import InvalidBudgetError

from . import arguments


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns the batches of one epoch, ``ceil(num_examples / batch_size)``.

    Never computed through a rate: ``int(1 / (batch_size / num_examples))`` loses a step for many sizes.

    Args:
        num_examples: Rows, at least 1.
        batch_size: Expected rows in a batch, at least 1.

    Returns:
        At least 1.
    """
    rows = arguments.count("num_examples", num_examples)
    return -(-rows // arguments.count("batch_size", batch_size))


def steps_of_epochs(epochs: float, sample_rate: float) -> int:
    """Returns the steps of so many epochs of ``1 / sample_rate`` steps each, to the nearest, at least 1.

    Where the rate is ``1 / n`` in floating point, that is ``epochs * n``; cutting off would lose a step for many n.

    Args:
        epochs: Positive.
        sample_rate: In (0, 1].

    Returns:
        At least 1.
    """
    length = arguments.epsilon_in_range(epochs, "epochs", zero=False)
    return max(1, round(length / arguments.sample_rate(sample_rate)))


def sample_rate_of(num_examples: int, batch_size: int) -> float:
    """Returns the chance of each row to be in a batch, ``batch_size / num_examples`` and at most 1."""
    rows = arguments.count("num_examples", num_examples)
    return min(1.0, arguments.count("batch_size", batch_size) / rows)


def suggested_delta(num_examples: int) -> float:
    """Returns ``num_examples ** -1.1``, which lies below the chance of naming one row at random.

    Args:
        num_examples: Rows, at least 2.

    Returns:
        In (0, 1/num_examples).

    Raises:
        InvalidBudgetError: If there is only one row, which no delta protects.
    """
    rows = arguments.count("num_examples", num_examples)
    if rows == 1:
        raise InvalidBudgetError("num_examples=1 leaves no delta below 1/N.", fix="Pass delta explicitly.")
    return float(rows**-1.1)


def check_delta(delta: float, num_examples: int, allow_large: bool = False) -> None:
    """Refuses a delta at which a guarantee says nothing about single rows."""
    value = arguments.delta_in_range(delta)
    rows = arguments.count("num_examples", num_examples)
    if value >= 1 / rows and not allow_large:
        suggestion = f"Suggested: {suggested_delta(rows):.1e}." if rows > 1 else ""
        raise InvalidBudgetError(
            f"delta={value:g} is too large for {rows:,} rows; at 1/N a mechanism may publish a whole record.",
            fix=suggestion,
        )

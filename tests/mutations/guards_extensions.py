"""Guards of extensions from outside: schemes, noise and policies that contradict what they state."""

from .guard import Guard

CONTRACTS = "extending/test_contracts.py::"
DRAWN = CONTRACTS + "test_a_scheme_that_draws_otherwise_than_stated_is_refused"
NOISE = CONTRACTS + "test_noise_without_an_analysis_is_refused"
EVENTS = "accounting/test_run_events.py::"

GUARDS = [
    Guard("scheme-trial", "batches of a scheme from outside are tried", "    if fault:\n", "    if False:\n", DRAWN),
    Guard(
        "scheme-rate",
        "a scheme that draws another rate",
        "    if error > spread:",
        "    if False:",
        DRAWN + "[scheme0-examples were drawn instead of 5,760]",
    ),
    Guard(
        "scheme-repeats",
        "a batch with an example twice",
        "    if not distinct or (len(indices)",
        "    if (len(indices)",
        DRAWN + "[scheme8-did not return distinct indices]",
    ),
    Guard(
        "scheme-repeatable",
        "another batch for the same words",
        "    if not all(map(np.array_equal, batches, again)):",
        "    if False:",
        DRAWN + "[scheme7-two batches for the same step]",
    ),
    Guard(
        "strategy-checked",
        "a strategy that is not the inverse of the noise",
        "    if not error < _TOLERANCE:",
        "    if False:",
        NOISE,
    ),
    Guard(
        "policy-lowers-noise",
        "a policy that lowers the noise",
        "        if not found >= noise_multiplier:",
        "        if False:",
        CONTRACTS + "test_a_policy_cannot_lower_the_noise",
    ),
    Guard(
        "event-table",
        "noise of more bands than the cycle has groups is no sampled Gaussian",
        'return "once" if correlation.bands is not None and correlation.bands <= participation.apart else "all"',
        'return "once"',
        EVENTS + "test_a_combination_has_the_event_of_its_row",
    ),
    Guard(
        "event-separated",
        "a minimum separation is not analyzed for add-or-remove",
        "    if release.relation is Relation.ADD_OR_REMOVE_ONE:  # an example more may",
        "    if False:  # an example more may",
        EVENTS + "test_what_has_no_analysis_has_no_claim",
    ),
]

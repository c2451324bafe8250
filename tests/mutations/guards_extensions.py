"""Guards of extensions from outside: schemes, noise and policies that contradict what they state."""

from .guard import Guard

CONTRACTS = "extending/test_contracts.py::"
DRAWN = CONTRACTS + "test_a_scheme_whose_draws_contradict_its_participation_is_rejected"
NOISE = CONTRACTS + "test_noise_without_an_analysis_is_rejected"
EVENTS = "accounting/test_events.py::"

GUARDS = [
    Guard("batches of a scheme from outside are tried", "    if fault:\n", "    if False:\n", DRAWN),
    Guard(
        "a scheme that draws another rate",
        "    if excess > limit or (excess < -limit and not truncated):",
        "    if False:",
        DRAWN + "[scheme0-examples were drawn instead of 5,760]",
    ),
    Guard(
        "a batch with an example twice",
        "    if not distinct or (len(indices)",
        "    if (len(indices)",
        DRAWN + "[scheme8-did not return distinct indices]",
    ),
    Guard(
        "another batch for the same words",
        "    if not all(map(np.array_equal, batches, repeated)):",
        "    if False:",
        DRAWN + "[scheme7-two different batches for the same step]",
    ),
    Guard(
        "an example that is in more batches than stated",
        "    exceeds = largest > mean",
        "    exceeds = False and largest > mean",
        DRAWN + "[scheme11-an example is in 120 batches instead of about 30]",
    ),
    Guard(
        "batches that do not depend on the secret words",
        "    if _is_secret(participation) and",
        "    if False and",
        DRAWN + "[scheme13-the same batches for other words]",
    ),
    Guard(
        "epochs are those of the participation, also if a pass of the loader is longer",
        "self.sampling.participation.epoch_steps for step in steps",
        "self.sampling.steps_per_epoch for step in steps",
        CONTRACTS + "test_batches_of_two_declared_epochs_cannot_share_a_step",
    ),
    Guard(
        "a policy that lowers its bounds between clipping and noise",
        "    if tuple(policy.bounds) != bounds:",
        "    if False:",
        CONTRACTS + "test_a_policy_cannot_lower_its_bound_after_a_batch_was_clipped",
    ),
    Guard(
        "weights of noise that change after their analysis",
        "        lambda step: rows[step][:2],",
        "        noise.row,",
        CONTRACTS + "test_later_changes_do_not_affect_the_analyzed_weights",
    ),
    Guard(
        "a checkpoint of noise with other weights of the same name",
        "f\"{getattr(noise, 'name', name)}-{digest}\"",
        'getattr(noise, "name", name)',
        CONTRACTS + "test_later_changes_do_not_affect_the_analyzed_weights",
    ),
    Guard(
        "a resumed scheme draws from the words of the batches so far",
        "if is_partition or step < end",
        "if is_partition",
        "checkpoint/test_save.py::test_samples_stay_separate_over_two_interruptions_without_steps_in_between",
    ),
    Guard(
        "noise that continues with another generator",
        "    if len({*saved, *current}) > 1 and noise.regenerates:",
        "    if False:",
        "checkpoint/test_save.py::test_a_matrix_that_generates_rows_again_continues_only_with_their_generator",
    ),
    Guard(
        "noise of a model that moves to another device",
        "        if generator != earlier and self._recurrence.regenerates:",
        "        if False:",
        "checkpoint/test_save.py::test_a_model_that_moves_during_training_raises_where_noise_would_not_cancel",
    ),
    Guard("a strategy that is not the inverse of the noise", "    if not error < _TOLERANCE:", "    if False:", NOISE),
    Guard(
        "a plan costs what its draws state for the number of examples",
        "return self.sampling.participation() if size is None else self.sampling.over(size).participation",
        "return self.sampling.participation()",
        "plan/test_plan.py::test_epsilon_follows_from_the_participation_of_the_draws",
    ),
    Guard(
        "noise so large that float32 rounds away the new noise",
        "    if growth.max() > _MAX_GROWTH:",
        "    if False:",
        CONTRACTS + "test_noise_that_float32_would_round_away_is_rejected",
    ),
    Guard(
        "a policy that lowers the noise",
        "        if not multiplier >= noise_multiplier:",
        "        if False:",
        CONTRACTS + "test_a_policy_cannot_lower_the_noise",
    ),
    Guard(
        "noise of more bands than the cycle has groups is no sampled Gaussian",
        "correlation.bands is not None and correlation.bands <= participation.min_separation",
        "True",
        EVENTS + "test_a_combination_has_the_event_of_its_row",
    ),
    Guard(
        "epochs are not analyzed for add-or-remove",
        "    if participation.claimed and step.relation is Relation.ADD_OR_REMOVE_ONE:",
        "    if False:",
        EVENTS + "test_mechanisms_without_an_analysis_claim_no_epsilon",
    ),
    Guard(
        "truncated groups of other sizes than N / groups",
        "    if drawn.cycle_length > 1 and not drawn.equal_groups:",
        "    if False:",
        EVENTS + "test_a_combination_has_the_event_of_its_row",
    ),
    Guard(
        "a minimum separation is not analyzed for add-or-remove",
        "    if step.relation is Relation.ADD_OR_REMOVE_ONE:  # adding an example may",
        "    if False:  # adding an example may",
        EVENTS + "test_mechanisms_without_an_analysis_claim_no_epsilon",
    ),
    Guard(
        "groups that are not of the stated equal size",
        "        if max(group_sizes) > examples:",
        "        if False:",
        CONTRACTS + "test_groups_of_another_size_than_declared_are_rejected",
    ),
]

"""Guards of runs over some of the parameters, and of models whose hooks came before the run."""

from .guard import Guard

SUBSET = "engine/test_restrict_to_optimizer.py::"
WRAPPER = "engine/test_private_wrapper.py::"

GUARDS = [
    Guard(
        "a run that has begun is not restricted",
        "if has_begun or run.resumed or not run.attached:",
        "if run.resumed or not run.attached:",
        f"{SUBSET}test_a_run_that_has_begun_or_ended_is_rejected",
    ),
    Guard(
        "a run that has ended is not restricted",
        "if has_begun or run.resumed or not run.attached:",
        "if has_begun or run.resumed:",
        f"{SUBSET}test_a_run_that_has_begun_or_ended_is_rejected",
    ),
    Guard(
        "a restriction with several processes",
        "if passes.topology.everyone.size > 1:  # the rank fingerprint does not",
        "if False:  # the rank fingerprint does not",
        f"{SUBSET}test_several_processes_are_rejected",
    ),
    Guard(
        "other modes do not form norms of a subset",
        '    if passes.grad_sample_mode != "auto":',
        "    if False:",
        f"{SUBSET}test_unsupported_options_are_rejected_and_nothing_is_restricted",
    ),
    Guard(
        "an optimizer that holds all parameters is not restricted",
        "    if parameters.issuperset(passes.model.parameters()):\n        return\n",
        "",
        f"{SUBSET}test_an_optimizer_that_holds_all_parameters_is_not_restricted",
    ),
    Guard(
        "a subset without a trainable parameter",
        "    if not names:\n        raise ParameterMismatchError(\n            ",
        "    if False:\n        raise ParameterMismatchError(\n            ",
        f"{SUBSET}test_an_optimizer_without_a_trainable_parameter_is_rejected",
    ),
    Guard(
        "thresholds fit the subset",
        "    run.step.plan.clipping.group_of(names)",
        "    pass",
        f"{SUBSET}test_unsupported_options_are_rejected_and_nothing_is_restricted",
    ),
    Guard(
        "a subset that was frozen or replaced as a whole",
        "            if not trainable:",
        "            if False:",
        f"{SUBSET}test_a_subset_that_is_frozen_or_replaced_as_a_whole_is_rejected",
    ),
    Guard(
        "a parameter of the subset that was frozen since the forward pass",
        "mode.keep(self.only)",
        "mode.keep(set(trainable.values()))",
        f"{SUBSET}test_a_parameter_frozen_between_forward_and_backward_is_rejected",
    ),
    Guard(
        "a parameter of the subset that was replaced",
        "    if passes.only is not None:  # then `released` lacks",
        "    if False:  # then `released` lacks",
        f"{SUBSET}test_replaced_parameter_is_rejected",
    ),
    Guard(
        "samples whose gradient over the subset is zero are counted",
        "            return torch.zeros(rows, num_groups)",
        "            return torch.zeros(0, num_groups)",
        f"{SUBSET}test_unused_subset_has_zero_gradients",
    ),
    Guard(
        "a checkpoint is loaded into a buffer of the subset",
        "    passes.only = parameters\n    passes.update_buffer()\n",
        "    passes.only = parameters\n",
        f"{SUBSET}test_correlated_noise_continues_after_a_checkpoint",
    ),
    Guard(
        "a checkpoint of a run over other parameters",
        "            if parameter in trained\n",
        "            if parameter.requires_grad\n",
        f"{SUBSET}test_a_checkpoint_is_of_a_run_with_the_same_restriction",
    ),
    Guard(
        "a run that was resumed before its first step is not restricted",
        "if has_begun or run.resumed or not run.attached:",
        "if has_begun or not run.attached:",
        f"{SUBSET}test_a_run_resumed_before_its_first_step_is_rejected",
    ),
    Guard(
        "the hooks of the wrapper are off during the run",
        "                recorder._clipper.detach()\n",
        "                pass\n",
        f"{WRAPPER}test_gradients_are_those_of_a_loop_over_samples",
    ),
    Guard(
        "an error while hooks are attached gives the wrapper its hooks back",
        "                undo.callback(recorder._clipper.attach)\n",
        "",
        f"{WRAPPER}test_an_error_while_hooks_are_attached_changes_nothing",
    ),
    Guard(
        "the wrapper gets its hooks back at the end",
        "                self.recorder._clipper.attach()",
        "                pass",
        f"{WRAPPER}test_detach_attaches_the_hooks_again",
    ),
    Guard(
        "results from before the run are dropped",
        "            recorder._forget_results()",
        "            pass",
        f"{WRAPPER}test_detach_attaches_the_hooks_again",
    ),
    Guard(
        "a wrapper without hooks gets none",
        "isinstance(self.model, GradSampleModule) and self.model._attached",
        "isinstance(self.model, GradSampleModule)",
        f"{WRAPPER}test_a_wrapper_without_hooks_stays_without_them",
    ),
    Guard(
        "the wrapper shows nothing during the run",
        "        self._check_not_private()\n        if self._last is None",
        "        if self._last is None",
        f"{WRAPPER}test_wrapper_has_no_results_while_private",
    ),
    Guard(
        "the wrapper is not removed during the run",
        "        self._check_not_private()\n        self._clipper.detach()",
        "        self._clipper.detach()",
        f"{WRAPPER}test_the_wrapper_cannot_be_removed_while_private",
    ),
    Guard(
        "a forward pass from before the run",
        "            self._check_not_private()  # the forward pass may",
        "            pass  # the forward pass may",
        f"{WRAPPER}test_backward_over_a_forward_pass_from_before_shows_nothing",
    ),
    Guard(
        "a copy of the wrapper is not private",
        "self.state is CaptureState.DETACHED and self.model in _watched",
        "self.state is CaptureState.DETACHED",
        f"{WRAPPER}test_copy_made_while_private_has_no_private_hooks",
    ),
    Guard(
        "a wrapper of several processes",
        "if wrapper is not model or topology is not SINGLE or unwrapped(wrapper.module) is not wrapper.module:",
        "if wrapper is not model or unwrapped(wrapper.module) is not wrapper.module:",
        f"{WRAPPER}test_distributed_models_are_rejected",
    ),
    Guard(
        "DistributedDataParallel around a wrapper",
        "if wrapper is not model or topology is not SINGLE or unwrapped(wrapper.module) is not wrapper.module:",
        "if topology is not SINGLE or unwrapped(wrapper.module) is not wrapper.module:",
        f"{WRAPPER}test_distributed_models_are_rejected",
    ),
    Guard(
        "DistributedDataParallel in a wrapper",
        "if wrapper is not model or topology is not SINGLE or unwrapped(wrapper.module) is not wrapper.module:",
        "if wrapper is not model or topology is not SINGLE:",
        f"{WRAPPER}test_distributed_models_are_rejected",
    ),
    Guard(
        "a wrapper with other settings than the run",
        "        if argument != setting:",
        "        if False:",
        f"{WRAPPER}test_an_argument_that_does_not_fit_changes_nothing",
    ),
    Guard(
        "a checkpoint has the names of the module",
        "    return inner.module if isinstance(inner, GradSampleModule) else inner",
        "    return inner",
        f"{WRAPPER}test_a_checkpoint_does_not_depend_on_the_wrapper",
    ),
    Guard(
        "outputs that change with the padding",
        "        return bool((far & finite & (used != 0)).any())",
        "        return False",
        "independence/test_padding_probe.py::test_a_model_that_does_not_mask_padding_is_rejected",
    ),
    Guard(
        "a loss that counts padding",
        "        if used.count_nonzero() != total:",
        "        if False:",
        "independence/test_padding_probe.py::test_a_loss_that_counts_padding_is_rejected[padding_counts]",
        also=(
            (
                "if any(_changes(rerun, baseline, batch_axis, padding, n, tolerance) "
                "for n in shorter_lengths(padding)):",
                "if False:",
            ),
        ),
    ),
    Guard(
        "a loss that divides by the padded length",
        "if any(_changes(rerun, baseline, batch_axis, padding, n, tolerance) for n in shorter_lengths(padding)):",
        "if False:",
        "independence/test_padding_probe.py::test_a_loss_that_counts_padding_is_rejected[mean_of_masked]",
    ),
    Guard(
        "padding to one length",
        " > 1 for lengths in self._changed_at.values()):\n            raise padding_error()\n        if",
        " > 0 for lengths in self._changed_at.values()):\n            raise padding_error()\n        if",
        "independence/test_padding_probe.py::test_padding_to_one_length_is_accepted",
    ),
    Guard(
        "a batch of another length",
        "other_length = probe.needs_other_length and shapes != self._shapes and self._lengths_left > 0",
        "other_length = False",
        "independence/test_padding_probe.py::test_a_model_that_does_not_mask_padding_is_rejected[plain_mean-auto]",
    ),
    Guard(
        "models with dropout are compared without it",
        "            if self._drew:\n                model.eval()\n",
        "",
        "independence/test_padding_probe.py::test_a_model_that_masks_padding_is_accepted[with_dropout-auto]",
    ),
]

"""Peak memory of torch's CPU allocator during a call, in bytes above the start."""

from torch.profiler import ProfilerActivity, profile


def peak_of(run):
    """Runs it, and sums up what was allocated and freed, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most

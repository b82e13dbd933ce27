"""What happens to jobs, runs and nodes after admission: binding, retries, preemption, dependencies, the end."""

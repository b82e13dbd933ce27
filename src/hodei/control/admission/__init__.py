"""What a job must pass before it is queued, which profile it goes to, and what happens if it waits too long."""

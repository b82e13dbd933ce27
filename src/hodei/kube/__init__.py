"""Hodei as a pod scheduler of a Kubernetes cluster (`scheduler`), on its own client of the Kubernetes API (`api`)."""

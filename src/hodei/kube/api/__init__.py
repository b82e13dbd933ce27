"""Client, watches, leader election and objects of the Kubernetes API, for the pod scheduler and the Kubernetes backend."""

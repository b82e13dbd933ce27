"""KUBE COAT: Hodei as a pod scheduler inside a cluster.

What is here decides nothing: pods and nodes become the model's jobs and nodes (`translate`), the engine's answers become
the words that users of Kubernetes know (`wording`). Nothing here opens a connection.
"""

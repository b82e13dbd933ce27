"""Request and response types of the REST API, shared by server and client."""

"""The words of the API: what the server and its clients send each other, and conversion to the model. Nothing else."""

"""THE COMMAND LINE: `hodei …`. It uses the client, the API types and the model, never the server. Commands are imported on
first use, so it starts fast. Start reading at `main`."""

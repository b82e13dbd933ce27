"""THE TERMINAL: `hodei …`. Knows the client, the API types and the nouns, never the server; starts fast because every
command lives in a module that is imported only when it is used. The story begins in `main`."""

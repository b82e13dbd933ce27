"""Agents that dial out to this server: their credentials (`registry`), their sessions (`hub`), and the basis of every backend
whose nodes are such agents (`backend`)."""

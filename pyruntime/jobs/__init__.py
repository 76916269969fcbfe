"""Requests inside the engine: made of sequences, fed with what the heads read, answered to event loops."""

"""Loading a transformers model and running it over packed batches."""

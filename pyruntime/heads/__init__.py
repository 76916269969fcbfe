"""What reads the hidden rows after the shared forward: sampler, pooler, score head, by task."""

"""What a running server tells about itself. Reads counters that others keep; nothing here computes or serves models."""

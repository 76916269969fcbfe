"""Who runs next, and where its keys and values lie: queue, policy, blocks, batch building."""

"""Constraints on generated text: compiled within limits, then one matcher for each continuation. Knows no torch."""

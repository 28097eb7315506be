"""Full implementations of seams that keep everything in memory. They pass the same tests as the real ones."""

"""The workshop: from a public checkpoint to a bundle that was proven to read as well as the original."""

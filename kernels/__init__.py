"""How the hard operators of a recogniser are computed."""

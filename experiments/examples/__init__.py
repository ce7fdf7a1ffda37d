"""Short tasks of other kinds than classification, each to be copied from."""

"""One screen an area, each with its style sheet beside it."""

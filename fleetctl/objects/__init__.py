"""Objects as verbs name, select, read, query and write them."""

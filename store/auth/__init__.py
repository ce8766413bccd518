"""Who may read and write which keys, and the files that say who somebody is."""

"""Outputs of macOS commands, one folder for each Mac and build, and the import of reports."""

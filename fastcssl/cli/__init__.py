"""The command-line programs, one module per command."""

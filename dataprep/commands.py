"""The entry point of fastcssl-prep. Signals are caught before anything slow is imported."""

from dataprep.startup import begin_command


def prep() -> int:
    """Runs fastcssl-prep and returns its exit status."""
    begin_command()
    from dataprep.cli import main

    return main()

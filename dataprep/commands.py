"""The entry point of fastcssl-prep. Signals are caught before anything slow is imported."""

from dataprep.startup import catch_signals


def prep() -> int:
    """Runs fastcssl-prep and returns its exit status."""
    catch_signals()
    from dataprep.cli import main

    return main()

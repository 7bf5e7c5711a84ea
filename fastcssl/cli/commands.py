"""The entry points of the commands. Signals are caught before anything slow, such as torch, is imported."""

from dataprep.startup import begin_command


def train() -> int:
    """Runs fastcssl-train and returns its exit status."""
    begin_command()
    from fastcssl.cli.train import main

    return main()


def eval_() -> int:
    """Runs fastcssl-eval and returns its exit status."""
    begin_command()
    from fastcssl.cli.eval import main

    return main()


def report() -> int:
    """Runs fastcssl-report and returns its exit status."""
    begin_command()
    from fastcssl.cli.report import main

    return main()


def doctor() -> int:
    """Runs fastcssl-doctor and returns its exit status."""
    begin_command()
    from fastcssl.cli.doctor import main

    return main()


def demo() -> int:
    """Runs fastcssl-demo and returns its exit status."""
    begin_command()
    from fastcssl.cli.demo import main

    return main()

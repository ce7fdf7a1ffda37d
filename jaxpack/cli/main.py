"""The commands, and where all of them end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tyro

from jaxpack.cli import errors
from jaxpack.cli.checking import devices, verify
from jaxpack.cli.example import init
from jaxpack.cli.flags import CONFIG
from jaxpack.cli.reading import compare, export, report, status
from jaxpack.cli.running import explain, sweep
from jaxpack.types import near

COMMANDS: dict[str, Callable[..., int]] = {
    "init": init,
    "explain": explain,
    "sweep": sweep,
    "status": status,
    "report": report,
    "compare": compare,
    "export": export,
    "verify": verify,
    "devices": devices,
}


def overview() -> str:
    """The commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:<{width}}  {(command.__doc__ or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: python -m jaxpack COMMAND ...\n",
            "Trains many small networks in one XLA program, under Hyperband.\n",
            *lines,
            "\nCOMMAND --help says more, with an example.",
        ]
    )


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      args: The command and its arguments; those of the process if None.

    Returns:
      The exit code: 0, 1 if it failed, 2 if it was called wrongly, or 128 and the
      number of the signal that ended it.

    Raises:
      SystemExit: With 0 after a command's `--help`, and 2 if there is no such flag.
    """
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return errors.DONE if args else errors.WRONG_USE
    name, *rest = args
    try:
        if name not in COMMANDS:
            raise errors.UsageError(
                f"there is no command {name!r}{near(name, COMMANDS)}"
            )
        # One command at a time: tyro's errors then speak of no other's flags.
        command, prog = COMMANDS[name], f"python -m jaxpack {name}"
        with errors.warnings_in_a_line():
            return tyro.cli(command, prog=prog, args=rest, config=CONFIG)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted {interrupt}".rstrip(), file=sys.stderr)
        return errors.SIGNALLED + 2
    except BrokenPipeError:  # Who reads has seen enough.
        sys.stdout = None
        return errors.DONE
    except Exception as error:
        return errors.tell(error)

"""The command line: parse, call, print. Nothing heavy is imported before the arguments are known to be right."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from raynforce.cli.parser import kernels_asked_for, parse
from raynforce.errors import RaynforceError, summary
from raynforce.kernels import pin
from raynforce.threads import cap_threads

cap_threads()  # before numpy is imported


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 2 wrong use, 1 failure, 128 + n on signal n."""
    debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a pipe that nobody reads can still be forgiven
        return code
    except RaynforceError as error:
        _complain(str(error), debug)
        return error.exit_code
    except KeyboardInterrupt as error:
        return 128 + (error.args[0] if error.args and isinstance(error.args[0], int) else 2)
    except SystemExit as error:
        _complain(f"your code called sys.exit({error.code!r})", debug)
        return 1
    except BrokenPipeError:  # `raynforce … | head`: nobody reads any more, and nobody needs to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MemoryError:
        _complain("out of memory: lower sampling.envs, algorithm.buffer_size or the size of the network", debug)
        return 1
    except Exception as error:
        _complain(f"{summary(error)}{'' if debug else ' (--debug shows where)'}", debug)
        return 1


def _run(words: list[str]) -> int:
    try:
        arguments = parse(words)
    except SystemExit:  # --help has been printed
        return 0
    if arguments.command is not None:
        pin(kernels_asked_for(arguments))  # before numpy is imported
    from raynforce.cli import commands

    return commands.run(arguments)


def _complain(line: str, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()
    line = f"raynforce: {line}"
    if sys.stderr is not None and sys.stderr.isatty():  # elsewhere an error is one line, to be searched for
        from raynforce.runs.terminal import columns, folded

        line = "\n".join(folded(line, columns(sys.stderr), further="  "))
    print(line, file=sys.stderr)

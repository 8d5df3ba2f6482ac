"""Print the script that completes commands and flags of tprimat in a shell.

eval "$(tprimat completion bash)"                        in ~/.bashrc
tprimat completion zsh > "${fpath[1]}/_tprimat"
"""

import argparse
from importlib import import_module

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of the shell."""
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    import shtab

    print(shtab.complete(every_command(), options.shell))
    return 0


def every_command() -> argparse.ArgumentParser:
    """Return one parser of all commands, with the strategies and models of TPrimat's own configuration as choices."""
    from tprimat.cli.main import COMMANDS, module_name, parser_of
    from tprimat.config.load import load_config

    config = load_config()
    choices = {"--parallel": list(config.parallelism), "--model": [*config.models, "all"]}
    whole = argparse.ArgumentParser(prog="tprimat")
    commands = whole.add_subparsers()
    for name, summary in COMMANDS.items():
        parser = parser_of(import_module(module_name(name)), f"tprimat {name}")
        for action in parser._actions:
            words = next((choices[flag] for flag in action.option_strings if flag in choices), None)
            action.choices = words or action.choices
        commands.add_parser(name, help=summary, parents=[parser], add_help=False, conflict_handler="resolve")
    return whole

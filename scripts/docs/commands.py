"""The page of all commands, docs/commands.md, from their parsers."""

import argparse

from titan_moe.cli.main import COMMANDS, load_command


def sections() -> str:
    """Returns one section for each command: what it does, and its arguments."""
    lines: list[str] = []
    for name, summary in COMMANDS.items():
        command = load_command(name)
        parser = argparse.ArgumentParser(add_help=False)
        command.add_arguments(parser)
        lines += ["", f"## titan-moe {name}", "", _sentence(summary)]
        arguments = [_row(action) for action in parser._actions]
        if command.overrides:
            arguments.append("| `--config FILE`, `--table.key value` | the configuration |")
        if arguments:
            lines += ["", "| argument | meaning |", "|---|---|", *arguments]
    return "\n".join(lines)


def _row(action: argparse.Action) -> str:
    places = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    names = [f"`{flag}{places}`" for flag in action.option_strings] or [f"`{places.strip()}`"]
    meaning = (action.help or "") % (vars(action) | {"prog": "titan-moe"})
    return f"| {', '.join(names)} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."

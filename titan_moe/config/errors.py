"""The one configuration error."""


class ConfigError(Exception):
    """Everything wrong with a configuration, a line each: key, value, remedy. Exit code 2."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines

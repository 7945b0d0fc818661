"""`python -m titan_moe COMMAND`, the same as the console script `titan-moe`."""

from titan_moe.cli.main import entry

if __name__ == "__main__":
    entry()
